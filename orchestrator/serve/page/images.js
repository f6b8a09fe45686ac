// Larger files are not read.
const FILE_BYTES = 2 ** 26;
// The server's limits: bytes and pixels of an image, number of images in a request. null: the model
// takes no images. undefined: not known yet.
let limits;

const million = (pixels) => (pixels / 1e6).toFixed(pixels < 1e7 ? 1 : 0) + " million";

function takeLimits(latest) {
  limits = latest;
  $("attach").hidden = !limits;
}

const dataUrl = (blob) => new Promise((done, fail) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => fail(reader.error);
  reader.readAsDataURL(blob);
});

// Return the type of a PNG or a JPEG by its first bytes, "" for any other file.
async function typeOf(file) {
  const head = new Uint8Array(await file.slice(0, 8).arrayBuffer());
  const begins = (...bytes) => bytes.every((each, i) => each === head[i]);
  return begins(137, 80, 78, 71, 13, 10, 26, 10) ? "image/png" : begins(255, 216, 255) ? "image/jpeg" : "";
}

// Return a file as the data URL of an image. A PNG or a JPEG is not changed. Any other type that the browser can
// decode becomes a PNG. Throws Error if the image exceeds the limits `most`.
async function imageOf(file, most) {
  const fail = (why) => { throw new Error((file.name || "The image") + " " + why); };
  if (file.size > FILE_BYTES) fail("has " + size(file.size) + ". The page reads up to " + size(FILE_BYTES) + ".");
  const check = (bytes) => {
    if (bytes > most.bytes) fail("has " + size(bytes) + " as it would be sent. The limit is " + size(most.bytes) + ".");
  };
  const type = await typeOf(file), image = made("img");
  if (type) check(file.size);
  image.src = await dataUrl(type ? new Blob([file], { type }) : file);
  await image.decode().catch(() => fail("is not an image that this browser can read. Convert it to PNG or JPEG."));
  const { naturalWidth: width, naturalHeight: height } = image;
  if (width * height > most.pixels) {
    fail("has " + million(width * height) + " pixels. The limit is " + million(most.pixels) + ".");
  }
  if (type) return image.src;
  const canvas = Object.assign(made("canvas"), { width, height });
  canvas.getContext("2d").drawImage(image, 0, 0);
  const png = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (!png) fail("cannot be converted to PNG by this browser.");
  check(png.size);
  return dataUrl(png);
}

// Show images in a list. A click enlarges one. `remove`, if it is given, removes the image at an index.
function showImages(list, urls, remove = null) {
  list.hidden = urls.length === 0;
  list.replaceChildren(...urls.map((url, i) => {
    const item = made("li"), image = Object.assign(made("img"), { src: url, alt: "", draggable: false });
    const name = "image " + (i + 1) + " of " + urls.length, look = button("", () => {
      look.setAttribute("aria-expanded", String(item.classList.toggle("large")));
    }, "Enlarge " + name);
    look.setAttribute("aria-expanded", "false");
    look.append(image);
    item.append(look);
    if (remove) item.append(button("×", () => remove(i), "Remove " + name));
    return item;
  }));
}

// The images of a question that is being written, shown in a list.
class Attached {
  reading = 0;

  constructor(list, urls = []) {
    this.list = list;
    this.set(urls);
  }

  set(urls) {
    this.urls = urls;
    showImages(this.list, urls, (i) => this.set(this.urls.filter((_, at) => at !== i)));
  }

  // Read files and add their images. Show why one cannot be added.
  async add(files) {
    const most = limits, tell = (text) => ($("status").textContent = text);
    if (!most) {
      tell(most === null ? "The model takes no images." : "The model is loading.");
      return;
    }
    this.reading++;
    let wrong = "";
    for (const file of files) {
      tell("Reading " + (file.name || "the image"));
      try {
        const url = await imageOf(file, most);
        if (this.urls.length >= most.count) throw new Error("A question can have at most " + most.count + " images.");
        this.set([...this.urls, url]);
      } catch (error) {
        wrong = error.message;
      }
    }
    this.reading--;
    tell(wrong);
  }
}

// Return messages as the server gets them, with their images as content parts, and the number of images that
// are left out: all if the model takes none, or else the oldest ones above the server's limit.
function withImages(path) {
  let space = limits ? limits.count : limits === null ? 0 : Infinity, lost = 0;
  const said = [...path].reverse().map(({ role, content, images = [] }) => {
    const n = Math.min(space, images.length);
    space -= n;
    lost += images.length - n;
    if (!n) return { role, content };
    const parts = images.slice(-n).map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
  });
  return { said: said.reverse(), lost };
}

const attached = new Attached($("attached"));
// The question that gets what is pasted or dropped: the one that is being edited there, or the new one.
const attachedAt = (element) => element.closest?.(".editing")?.attached || attached;
const hasFiles = (data) => data.types.includes("Files");

$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => {
  attached.add([...$("files").files]).then(() => $("text").focus());
  $("files").value = ""; // so that the same file can be chosen again
});
document.addEventListener("paste", (event) => {
  const { types, files } = event.clipboardData;
  // Office programs copy a picture of a text beside the text.
  if (!files.length || (types.includes("text/plain") && types.includes("text/html"))) return;
  event.preventDefault();
  attachedAt(event.target).add([...files]);
});
document.addEventListener("dragover", (event) => {
  if (!hasFiles(event.dataTransfer)) return;
  event.preventDefault(); // allows a drop here
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", ({ relatedTarget }) => {
  if (!relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  document.body.classList.remove("dropping");
  if (!hasFiles(event.dataTransfer)) return;
  event.preventDefault(); // the browser would leave the page and show the file
  attachedAt(event.target).add([...event.dataTransfer.files]);
});
