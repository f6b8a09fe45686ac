// The conversations in the browser's database. A message is a record of its own that names the
// message before it (`parent`). A new version of a question or an answer is another record with the
// same parent. So tabs that write at the same time add messages and replace none.
//
// conversation: id, title, at (time of the latest change), leaf (the message shown last), settings,
//   from (the first message that is sent, if the server accepts no more)
// message: id, of (conversation), parent, role, content, images (data URLs; absent without any),
//   reasoning, costs, at, writer (the run that wrote it), end ("running", "stopped", "cut", "length", or "" for a complete one)
const news = new BroadcastChannel("moe-edge");
let database = null, opening = null;

function opened() {
  opening ||= new Promise((done, fail) => {
    const request = indexedDB.open("moe-edge", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("of", "of");
    };
    request.onsuccess = () => done(database = request.result);
    request.onerror = () => fail(request.error);
  });
  return opening;
}

// Run work(conversations, messages, done) in a transaction, and return the value that it passes to done.
async function transact(mode, work) {
  if (!database) await opened();
  return new Promise((done, fail) => {
    const both = database.transaction(["conversations", "messages"], mode);
    let value;
    both.oncomplete = () => done(value);
    both.onabort = () => fail(both.error);
    work(both.objectStore("conversations"), both.objectStore("messages"), (result) => (value = result));
  });
}

const allConversations = () => transact("readonly", (conversations, _, done) => {
  conversations.getAll().onsuccess = ({ target }) => done(target.result.sort((a, b) => b.at - a.at));
});

// Return a conversation with its messages, or undefined if it does not exist.
const loaded = (id) => transact("readonly", (conversations, messages, done) => {
  conversations.get(id).onsuccess = ({ target: { result: conversation } }) => {
    if (!conversation) return;
    messages.index("of").getAll(id).onsuccess = ({ target }) => done({ conversation, messages: target.result });
  };
});

// Write fields of a conversation and, if one is given, a message, which becomes the one shown last.
// A conversation that another tab has deleted stays deleted. If another tab has written the message
// since this tab read it, the message gets an identifier of its own, and both stay.
function store(conversation, fields, message = null) {
  return transact("readwrite", (conversations, messages) => {
    conversations.get(conversation.id).onsuccess = ({ target: { result: before } }) => {
      if (!before && conversation.isKept) return;
      const { isKept: _, ...plain } = conversation;
      const finish = () => conversations.put({ ...(before || plain), ...fields, ...(message && { leaf: message.id }) });
      if (!message) return finish();
      messages.get(message.id).onsuccess = ({ target: { result: there } }) => {
        if (there && there.writer !== message.writer && there.writer !== message.was) rename(message);
        message.was = message.writer;
        const { was: _, ...record } = message;
        messages.put(record);
        finish();
      };
    };
  }).then(() => {
    conversation.isKept = true; // not before: the browser aborts what is being written while a page is left
    news.postMessage({ id: conversation.id });
  });
}

function remove(id) {
  return transact("readwrite", (conversations, messages) => {
    conversations.delete(id);
    messages.index("of").getAllKeys(id).onsuccess = ({ target }) => target.result.forEach((each) => messages.delete(each));
  }).then(() => news.postMessage({ id, isGone: true }));
}
