"""The page's renderer of markdown, in a page without a Content Security Policy."""

import json

import pytest
from browser import Tab, browsing
from tables import cases

from orchestrator.serve.views import PAGE

TAGS = "P H3 H4 H5 H6 HR UL OL LI BLOCKQUOTE DIV SPAN BUTTON PRE CODE TABLE THEAD TBODY TR TH TD A"
TAGS += " EM STRONG DEL BR"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        tab = Tab(browser)
        # Storage and addresses need a page that is not about:blank.
        folder = tmp_path_factory.mktemp("page")
        scripts = "".join((PAGE / name).read_text() for name in ("base.js", "markdown.js"))
        page = folder / "page.html"
        page.write_text(f"<!doctype html><body><div id=out></div><script>{scripts}</script>")
        tab.go(page.as_uri())
        yield tab


def written(tab, text):
    """Render a text and return its HTML."""
    return tab.value(
        f"out.sources = []; out.replaceChildren(); write(out, {json.dumps(text)}); out.innerHTML"
    )


LINK = (
    '<a href="https://a.b/c" title="https://a.b/c" target="_blank" rel="noopener noreferrer">{}</a>'
)


@cases(
    "text, html",
    ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("# A\n## B ##\n#C", "<h3>A</h3><h4>B</h4><p>#C</p>"),
    (
        "a *b* **c** ***d*** _e_ __f__ ~~g~~",
        "<p>a <em>b</em> <strong>c</strong> <strong><em>d</em>"
        "</strong> <em>e</em> <strong>f</strong> <del>g</del></p>",
    ),
    (
        "**a *b* c** and *a **b** c*",
        "<p><strong>a <em>b</em> c</strong> and <em>a <strong>b</strong> c</em></p>",
    ),
    (
        "2 * 3 * 4, snake_case_name, a ** b, *open",
        "<p>2 * 3 * 4, snake_case_name, a ** b, *open</p>",
    ),
    (r"\*a\* \# \\", r"<p>*a* # \</p>"),
    ("`a` ``b ` c`` ` d", "<p><code>a</code> <code>b ` c</code> ` d</p>"),
    ("`**a**` **`b`**", "<p><code>**a**</code> <strong><code>b</code></strong></p>"),
    (
        "- a\n- b\n  - c\n    - d\n- e",
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p><ul><li><p>d"
        "</p></li></ul></li></ul></li><li><p>e</p></li></ul>",
    ),
    ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
    (
        "1. a\n   - b\n\n   more\n2. c",
        '<ol start="1"><li><p>a</p><ul><li><p>b</p></li></ul><p>more</p>'
        "</li><li><p>c</p></li></ol>",
    ),
    (
        "text:\n- a\n- b\n\nafter",
        "<p>text:</p><ul><li><p>a</p></li><li><p>b</p></li></ul><p>after</p>",
    ),
    ("in\n1986. it was", "<p>in\n1986. it was</p>"),
    ("- [ ] a\n- [x] b", "<ul><li><p>☐ a</p></li><li><p>☑ b</p></li></ul>"),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    ("a\n\n---\n***\nb", "<p>a</p><hr><hr><p>b</p>"),
    ("[x](https://a.b/c)", f"<p>{LINK.format('x')}</p>"),
    (
        '[x](https://a.b/c "t") [x](<https://a.b/c>)',
        f"<p>{LINK.format('x')} {LINK.format('x')}</p>",
    ),
    (
        "see https://a.b/c. (https://a.b/c)",
        f"<p>see {LINK.format('https://a.b/c')}. ({LINK.format('https://a.b/c')})</p>",
    ),
    ("<https://a.b/c>", f"<p>{LINK.format('https://a.b/c')}</p>"),
    ("**[x](https://a.b/c)**", f"<p><strong>{LINK.format('x')}</strong></p>"),
    ("[`x` *y*](https://a.b/c)", f"<p>{LINK.format('<code>x</code> <em>y</em>')}</p>"),
    ("![x](https://a.b/c)", f"<p>{LINK.format('Image: x')}</p>"),
    ("[![x](https://d.e)](https://a.b/c)", f"<p>{LINK.format('Image: x')}</p>"),
    (
        "[a [x](https://a.b/c)](https://d.e)",
        f'<p>[a {LINK.format("x")}](<a href="https://d.e/" '
        'title="https://d.e/" target="_blank" rel="noopener noreferrer">https://d.e</a>)</p>',
    ),
    ("[https://bank.com](https://a.b/c)", f"<p>{LINK.format('https://bank.com')}</p>"),
    ("[x](y) [1] [x]", "<p>[x](y) [1] [x]</p>"),
    ("a<br>b<br/>c", "<p>a<br>b<br>c</p>"),
    ("a &lt; <b>", "<p>a &amp;lt; &lt;b&gt;</p>"),
)
def test_markdown_becomes_nodes(text, html, tab):
    assert written(tab, text) == html


def test_a_code_block_can_be_copied(tab):
    written(tab, "```python title\na = '<b>'\n\n  b\n```\nafter")
    assert tab.value("out.querySelector('pre').textContent") == "a = '<b>'\n\n  b"
    assert tab.value("out.querySelector('.bar span').textContent") == "python"
    assert tab.value("out.querySelector('.bar button').ariaLabel") == "Copy the code"
    assert tab.value("out.lastChild.textContent") == "after"
    # Without navigator.clipboard, as over plain HTTP.
    tab.value(
        "copies = []; document.execCommand = () => copies.push(document.activeElement.value) > 0"
    )
    tab.value("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    tab.value("out.querySelector('.bar button').click()")
    tab.until("out.querySelector('.bar button').textContent === 'Copied'")
    assert tab.value("copies.join()") == "a = '<b>'\n\n  b"
    # A block that is not yet closed, in an item of a list.
    written(tab, "1. a\n   ~~~~\n   ```\n   x")
    assert tab.value("out.querySelector('li pre').textContent") == "```\nx"


def test_tables(tab):
    written(tab, "| a | b |\n|:-:|--:|\n| `1` \\| 2 | **3** |\n| 4 |\n| 5 | 6 | 7 |\n\nafter")
    rows = (
        "[...out.querySelectorAll('tr')].map((row) => [...row.cells].map((each) => each.innerText))"
    )
    assert tab.value(rows) == [["a", "b"], ["1 | 2", "3"], ["4"], ["5", "6"]]
    assert tab.value(
        "[...out.querySelectorAll('th')].map((each) => each.style.textAlign).join()"
    ) == ("center,right")
    for text in (
        "| a | b |\n|---|",
        "| a |\n| b |",
        "a | b\n- | x",
        "|" * 300 + "\n" + "|-" * 299 + "|",
    ):
        written(tab, text)
        assert tab.value("out.querySelectorAll('table').length") == 0, text


def test_what_has_not_changed_stays(tab):
    """A growing answer keeps the nodes of its finished blocks."""
    written(tab, "one\n\ntwo")
    tab.value("first = out.firstChild, second = out.lastChild")
    tab.value(r"write(out, 'one\n\ntwo more')")
    assert tab.value("out.firstChild === first && out.lastChild !== second")
    assert tab.value("out.innerText") == "one\n\ntwo more"
    tab.value("write(out, '')")
    assert tab.value("out.children.length") == 0


JS = "javascript:hacked=1"
REMOTE = "http://remote.example/x"
HOSTILE = (
    # HTML
    "<script>hacked=1</script>",
    "<img src=x onerror=hacked=1>",
    f"<img src='{REMOTE}'>",
    "<svg onload=hacked=1>",
    "<svg><script>hacked=1</script></svg>",
    "<iframe src='javascript:hacked=1'>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'>",
    "<body onload=hacked=1>",
    "<a href='javascript:hacked=1'>x</a>",
    "<style>@import 'http://remote.example/x'</style>",
    f"<link rel=stylesheet href={REMOTE}>",
    f"<link rel=prefetch href={REMOTE}>",
    f"<meta http-equiv=refresh content='0;url={REMOTE}'>",
    f"<base href={REMOTE}>",
    f"<form action={REMOTE}><button>x</button></form>",
    "<input autofocus onfocus=hacked=1>",
    "<details open ontoggle=hacked=1>",
    f"<object data={REMOTE}>",
    f"<embed src={REMOTE}>",
    f"<video src={REMOTE} autoplay>",
    f"<audio src={REMOTE} autoplay>",
    "<math><mi//xlink:href='data:x,<script>hacked=1</script>'>",
    "<template><script>hacked=1</script></template>",
    "<noscript><p title='</noscript><img src=x onerror=hacked=1>'>",
    "<!--><img src=x onerror=hacked=1>-->",
    "<![CDATA[<script>hacked=1</script>]]>",
    "<?xml version='1'?><x>",
    "<scr<script>ipt>hacked=1</scr</script>ipt>",
    "</div></body></html><script>hacked=1</script>",
    "&lt;script&gt;hacked=1&lt;/script&gt;",
    "\x00<script>hacked=1</script>",
    "<br onclick=hacked=1>",
    "<br/><script>hacked=1</script>",
    "<BR onmouseover=hacked=1 autofocus>",
    # Addresses
    f"[x]({JS})",
    f"[x](<{JS}>)",
    f"<{JS}>",
    f"![x]({JS})",
    "[x](JaVaScRiPt:hacked=1)",
    "[x](java\tscript:hacked=1)",
    "[x]( javascript:hacked=1)",
    "[x](\x01javascript:hacked=1)",
    "[x](&#106;avascript:hacked=1)",
    "[x](javascript&colon;hacked=1)",
    "[x](java\\script:hacked=1)",
    "[x](vbscript:x)",
    "[x](data:text/html,<script>hacked=1</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD5oYWNrZWQ9MTwvc2NyaXB0Pg==)",
    "![x](data:image/svg+xml,<svg/onload=hacked=1>)",
    "![x](data:image/png;base64,AAAA)",
    "[x](file:///etc/passwd)",
    "[x](blob:http://a/b)",
    "[x](//remote.example/x)",
    "[x](/experts)",
    "[x](?q)",
    "[x](#y)",
    "[x](about:blank)",
    "[x](view-source:http://remote.example)",
    "[x](filesystem:http://remote.example)",
    "[x](ws://remote.example)",
    "[x](ftp://remote.example)",
    "[x](intent://x)",
    f"![x]({REMOTE})",
    f'![x]({REMOTE} "t" onerror=hacked=1)',
    f"[![x]({REMOTE})]({JS})",
    f"[![x]({JS})]({REMOTE})",
    f'[x]({REMOTE}" onclick="hacked=1)',
    f'[x](<{REMOTE}" onclick="hacked=1>)',
    f'[x]({REMOTE} "\\" onclick=hacked=1")',
    f'{REMOTE}"onclick="hacked=1',
    f'<{REMOTE}"onclick=hacked=1>',
    f"[{REMOTE}](http://other.example)",
    "[x]: javascript:hacked=1\n\n[x]",
    f"![x][y]\n\n[y]: {REMOTE}",
    "[x](http://a b)",
    "[x](http://[::1)",
    "http://",
    "https://)))",
    "[x](http://user:password@remote.example)",
    "[x](mailto:a@b.c?subject=<script>)",
    # Broken blocks
    "|a|b|\n|-|-|\n|<img src=x onerror=hacked=1>|[x](javascript:hacked=1)|",
    "|a|\n|-|\n|" + "x|" * 500,
    "|\n|\n|",
    "||||\n|-|-|-|",
    "|a|b\n-|-\n`|`|`|",
    "| a |\n|:::|",
    "|-|\n|-|\n|-|",
    "```<script>\nhacked=1",
    "```js\n</code></pre><script>hacked=1</script>",
    "``` `\n<script>hacked=1</script>",
    "~~~\n```\n<img src=x onerror=hacked=1>",
    "> <script>hacked=1</script>",
    "- <img src=x onerror=hacked=1>",
    "# <img src=x onerror=hacked=1>",
    "999999999. a\n1000000000. b",
    "-\n-\n-",
    "*\n\n\n*",
    ">\n>\n",
    "#######",
    "[[[[]]]](((())))",
    "***a**b*c_d__e~~f",
    "\u202e<script>\u2028hacked=1</script>",
    "\ud83d\\*a*\ud83d",
)
INSPECT = """
(() => {
  const wrong = [];
  for (const each of out.querySelectorAll("*")) {
    if (!ALLOWED.includes(each.tagName)) wrong.push(each.tagName);
    for (const { name, value } of each.attributes) {
      const may = { A: ["href", "title", "target", "rel"], OL: ["start"],
        BUTTON: ["type", "aria-label"], PRE: ["tabindex", "role", "aria-label"],
        DIV: ["class", "tabindex", "role", "aria-label"], TH: ["style"],
        TD: ["style"] }[each.tagName] || [];
      if (!may.includes(name)) wrong.push(each.tagName + " " + name);
      if (name === "href" && !/^(https?|mailto):/.test(value)) wrong.push(value);
    }
    if (each.tagName === "A" && each.querySelector("a")) wrong.push("nested links");
  }
  return wrong.join();
})()
"""


def test_hostile_answers_run_nothing_and_request_nothing(tab):
    assert len(HOSTILE) >= 100
    tab.value(f"ALLOWED = {json.dumps(TAGS.split())}")
    before = len(tab.events("Network.requestWillBeSent"))
    for text in HOSTILE:
        # Also within other blocks, and while the answer grows.
        for each in (
            text,
            f"**{text}**",
            f"a\n\n- {text}\n  > {text}",
            f"| a |\n|---|\n| {text} |",
        ):
            written(tab, each)
            assert tab.value(INSPECT) == "", each
        tab.value("write(out, '')")
        tab.value(
            f"for (let i = 0; i <= {len(text)}; i++) write(out, {json.dumps(text)}.slice(0, i))"
        )
        assert tab.value(INSPECT) == "", text
        assert "hacked" not in text or "hacked" in tab.value("out.textContent + out.innerHTML"), (
            text
        )
    # Give an event or a request the time to happen.
    tab.value("new Promise((done) => setTimeout(done, 300))")
    assert tab.value("typeof hacked") == "undefined"
    assert len(tab.events("Network.requestWillBeSent")) == before
    assert tab.events("Runtime.exceptionThrown") == []
    assert tab.value("location.protocol") == "file:"


@cases(
    "unit",
    *(
        "*a ",
        "**a ",
        "*a **b ",
        "**a *b* ",
        "***",
        "_a ",
        "*a_",
        "*_",
        "~~a ",
        "a*",
        "a** b** ",
        "*a*",
        "**a** ",
        "~~",
    ),
    *(
        "[",
        "]",
        "[]",
        "[a](",
        "![",
        "[a](b)",
        "](",
        "[a](http://b) ",
        "![a](http://b)",
        "[![",
        "*[a](http://b) ",
        '](a "',
        "](a '",
        "[](",
    ),
    *(
        "`",
        "`a",
        "``a`",
        "` ",
        "\\",
        "\\`",
        "<",
        "<http://",
        "http://",
        "http://a) ",
        "http://a/))))",
        "h",
        "<br>",
        "!",
    ),
    *(
        "> ",
        "- ",
        "* ",
        "1. ",
        "- a\n",
        "1. a\n",
        "- a\n\n",
        "\n",
        "> a\n",
        "# a\n",
        "#",
        " ",
        "-",
        "--- ",
        "* * ",
        "  - a\n",
    ),
    *(
        "|",
        "|-",
        "|a|\n|-|\n",
        "a|\n",
        "-|\n",
        "|-|\n",
        ":",
        "\\|",
        "```\n",
        "~~~\n",
        "```a\n",
        "```` ``` ",
    ),
)
def test_a_long_hostile_text_is_rendered(unit, tab):
    """A renderer whose time is quadratic would not end within the limit of a test."""
    length = tab.value(
        "(() => { const sheet = made('div'); write(sheet, UNIT.repeat(Math.ceil(400000 / "
        "UNIT.length))); return sheet.sources.join().length; })()".replace("UNIT", json.dumps(unit))
    )
    assert length >= 399000 or not unit.strip()


def test_nesting_is_bounded(tab):
    deep = [">" * 5000 + " a", "- " * 5000 + "a", "\n".join("  " * i + "- a" for i in range(300))]
    deep += ["*_" * 3000 + "a" + "_*" * 3000, "![" * 2000 + "a" + "](http://b)" * 2000]
    for text in deep:
        written(tab, text)
        depth = tab.value(
            "Math.max(...[...out.querySelectorAll('*')].map((each) => "
            "{ let n = 0; for (; each !== out; each = each.parentNode) n++; return n; }))"
        )
        assert depth < 40, text[:20]
