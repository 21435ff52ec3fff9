"""The documentation and the HTML report fit a wide window and a phone's window."""

from __future__ import annotations

import functools
import http.server
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.in_process import run_here
from tests.project.tree import ROOT

BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
WIDTHS = (1280, 400)
WAIT_S = 120

pytestmark = [
    pytest.mark.program,
    pytest.mark.xdist_group("tests/docs/test_page_widths.py"),  # They share a built documentation.
    pytest.mark.skipif(BROWSER is None, reason="needs Debian's chromium-headless-shell"),
]

MEASURE = """<!doctype html><meta charset="utf-8"><body><script>
// A table is clipped where it is wider than a box around it that does not scroll.
function clipped(inside) {
  for (const table of inside.document.querySelectorAll("table")) {
    for (let box = table.parentElement; box; box = box.parentElement) {
      const overflow = inside.getComputedStyle(box).overflowX;
      if (overflow === "auto" || overflow === "scroll") break;
      if (overflow !== "visible" && box.scrollWidth > box.clientWidth + 1) return true;
    }
  }
  return false;
}
// The first word in a table that is broken over two lines.
function split(inside) {
  for (const cell of inside.document.querySelectorAll(".md-typeset td, .md-typeset th")) {
    const texts = inside.document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[\\p{L}\\p{N}_]+/gu)) {
      const range = inside.document.createRange();
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) return word[0];
    }
  }
  return null;
}
async function measure(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border: 0; height: 900px; width: ${width}px`;
  frame.src = page;
  const loaded = new Promise(resolve => { frame.onload = resolve; });
  document.body.append(frame);
  await loaded;
  const root = frame.contentDocument.documentElement;
  const found = {page, width, inner: frame.contentWindow.innerWidth, scroll: root.scrollWidth,
                 height: root.scrollHeight, clipped: clipped(frame.contentWindow), split: split(frame.contentWindow)};
  frame.remove();
  return found;
}
(async () => {
  const all = [];
  for (const page of PAGES) for (const width of WIDTHS) all.push(await measure(page, width));
  await fetch("/", {method: "POST", body: JSON.stringify(all)});
})();
</script>"""

DIAGRAM = """<!doctype html><meta charset="utf-8"><body>SVG<script>
const boxes = [...document.querySelectorAll("rect")].map(rect => rect.getBBox());
const texts = [...document.querySelectorAll("text")].map(text => {
  const own = text.getBBox(), x = own.x + own.width / 2, y = own.y + own.height / 2;
  // The smallest box around the middle of the text.
  const [box] = boxes.filter(b => b.x < x && x < b.x + b.width && b.y < y && y < b.y + b.height)
    .sort((one, other) => one.width - other.width);
  return {text: text.textContent, fits: box && box.x < own.x && own.x + own.width < box.x + box.width};
});
fetch("/", {method: "POST", body: JSON.stringify(texts)});
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the documentation, and a measurement report beside it."""
    work = tmp_path_factory.mktemp("pages")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(work / "site")],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, timeout=WAIT_S, check=True,
    )  # fmt: skip
    report = work / "report.json"
    for command in (
        ["run", "--quick", "-t", "memory://?capacity=256MiB", "--ops", "20", "--out", str(report)],
        ["plot", str(report), "--out", str(work / "site/report")],
    ):
        done = run_here("bench", *command)
        assert done.returncode == 0, done.stderr
    return work / "site"


def test_no_page_scrolls_sideways(site: Path) -> None:
    """At 1,280 and 400 pixels no page is wider than its window; no table is clipped, and none breaks a word."""
    pages = [f"/{page.relative_to(site)}" for page in sorted(site.rglob("*.html"))]
    assert "/report/report.html" in pages and len(pages) > 20
    (site / "measure.html").write_text(
        MEASURE.replace("PAGES", json.dumps(pages), 1).replace("WIDTHS", json.dumps(WIDTHS), 1)
    )
    measured = _measured(site)
    assert len(measured) == len(pages) * len(WIDTHS)
    # The pages were loaded with their styles at the requested width.
    assert all(one["inner"] == one["width"] and one["height"] > 300 for one in measured)
    wrong = [one for one in measured if one["scroll"] > one["width"] or one["clipped"] or one["split"]]
    assert not wrong, "\n".join(map(str, wrong))


def test_code_has_colours_and_a_button_to_copy_it(site: Path) -> None:
    """The theme's configured features are on the pages."""
    page = (site / "getting-started/index.html").read_text()
    assert '<div class="highlight">' in page
    assert re.search(r'<span class="nt">[^<]*kv_connector', page)
    assert '"content.code.copy"' in page


def test_the_front_page_has_the_picture_and_the_numbers_of_the_readme(site: Path) -> None:
    """A reader sees both first; the numbers are in one place."""
    page = (site / "index.html").read_text()
    assert "images/architecture.svg" in page and "Numbers" in page
    cells = re.findall(r"\d\.\d+ s", (ROOT / "README.md").read_text().partition("## Numbers")[2])
    assert len(cells) > 5 and not [cell for cell in cells if cell not in page]


def test_pages_lead_to_the_next_and_the_previous_one(site: Path) -> None:
    """The foot of a page has both links."""
    page = (site / "getting-started/index.html").read_text()
    assert "md-footer__link--prev" in page and "md-footer__link--next" in page


def test_the_python_interface_is_made_from_docstrings(site: Path) -> None:
    """Every name listed on the page has an entry with text."""
    page = (site / "api/index.html").read_text()
    listed = []
    for module, members in re.findall(r"^::: (\S+)\n((?: .*\n)*)", (ROOT / "docs/api.md").read_text(), re.MULTILINE):
        listed += [f"{module}.{name}" for name in re.findall(r"- (\w+)", members)]
    assert len(listed) > 20
    assert not [name for name in listed if f'id="{name}"' not in page]
    assert "Whether lookups are answered from the medium" in page, "an attribute of TierStats"


def test_a_wide_page_is_found(tmp_path: Path) -> None:
    """The measurement distinguishes scrolling pages and clipped tables from correct ones."""
    table = '<table style="width: 900px"><tr><td>x</td></tr></table>'
    bodies = {
        "fits": "x",
        "scrolls": table,
        "split": '<div class="md-typeset"><table style="width: 4em; overflow-wrap: anywhere">'
        "<tr><td>several paragraphs_of_words</td></tr></table></div>",
        "boxed": f'<div style="overflow-x: auto">{table}</div>',
        "clipped": f'<div style="overflow: hidden">{table}</div>',
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.html").write_text(f"<!doctype html><body>{body}</body>")
    pages = [f"/{name}.html" for name in bodies]
    (tmp_path / "measure.html").write_text(MEASURE.replace("PAGES", json.dumps(pages), 1).replace("WIDTHS", "[400]", 1))
    found = {one["page"]: (one["scroll"] > 400, one["clipped"], one["split"]) for one in _measured(tmp_path)}
    assert found == {
        "/fits.html": (False, False, None),
        "/scrolls.html": (True, False, None),
        "/split.html": (False, False, "paragraphs_of_words"),
        "/boxed.html": (False, False, None),
        "/clipped.html": (False, True, None),
    }


@pytest.mark.parametrize(
    ("name", "room"),
    [("architecture", 0), ("architecture", 240), ("two-sides", 0), ("topologies", 0), ("prefill-decode", 0)],
)
def test_texts_of_a_diagram_stay_in_their_boxes(tmp_path: Path, name: str, room: int) -> None:
    """Texts fit even in a wide font, if the reader's system has no other; in narrower boxes they would not."""
    diagram = (ROOT / f"docs/images/{name}.svg").read_text()
    if room:
        diagram = diagram.replace(f'width="{room}"', 'width="150"')
    (tmp_path / "measure.html").write_text(DIAGRAM.replace("SVG", diagram))
    texts = _measured(tmp_path)
    assert len(texts) > 5
    assert all(text["fits"] for text in texts) == (not room), texts


def _measured(directory: Path) -> list[dict[str, object]]:
    """Open measure.html in the browser, and return the measurements that it sends."""
    assert BROWSER is not None
    answers: queue.Queue[bytes] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

        def do_POST(self) -> None:
            """Receive the measurements."""
            answers.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(directory))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = subprocess.Popen(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             f"--user-data-dir={directory / '.browser'}", "--window-size=1400,1000", "--remote-debugging-port=0",
             f"http://127.0.0.1:{server.server_port}/measure.html"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            measured: list[dict[str, object]] = json.loads(answers.get(timeout=WAIT_S))
            return measured
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()
