"""The page: what it says, that it is whole by itself, and how it looks in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.errors import ConfigError
from tightfit.planner.plan import Limits
from tightfit.policies import Tier
from tightfit.report.kinds import LOOKS
from tightfit.report.picture import Picture, check_picture_path, write_picture
from tightfit.units import MIB

TIGHT = Limits(device_bytes=2000 * MIB, host_bytes=64000 * MIB)


class Reader(HTMLParser):
    """Collects the tables, the classes and the attributes of a page; knows what must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[list[str]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in ("meta", "link"):
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("th", "td"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("th", "td"):
            self.cells[-1][-1] += data
        if "style" not in self.open:
            self.text += data


def picture(bill: MemoryTable, limits: Limits = TIGHT, title: str = "Bill") -> Picture:
    return Picture(title, [("model", "a/b: 1 parameter"), ("batch", "1 x 1")], bill, limits)


def test_the_tables_say_what_the_bill_says(bill: MemoryTable) -> None:
    page = Reader(picture(bill).to_html())
    assert ["kind", "load", "forward", "backward", "step"] in page.cells
    assert ["parameters", "500.0 MiB", "500.0 MiB", "500.0 MiB", "500.0 MiB"] in page.cells
    assert ["activations", "-", "300.0 MiB", "4 B", "-"] in page.cells
    assert ["total", "500.0 MiB", "1.81 GiB", "2.25 GiB", "2.05 GiB"] in page.cells
    assert ["total", "-", "400.0 MiB", "-", "-"] in page.cells


def test_the_page_says_what_was_asked_and_by_which_versions(bill: MemoryTable) -> None:
    text = Reader(picture(bill).to_html()).text
    for said in (
        "device: peak 2.25 GiB in backward, device limit 1.95 GiB: 300.0 MiB missing",
        "optimizer states: 1000.0 MiB, 43.5%",
        "a/b: 1 parameter",
        "logits: scores over the vocabulary",
    ):
        assert said in text, said
    assert "master weights" not in text
    assert re.search(r"tightfit \S+, torch \S+, transformers \S+; \d{4}-\d\d-\d\d \d\d:\d\d", text)


def test_bars_are_as_long_as_their_bytes(bill: MemoryTable) -> None:
    html = picture(bill).to_html()
    assert re.findall(r'class="bar" style="width:([\d.]+)%', html)[:4] == [
        f"{round(100 * total / 2300, 3)}" for total in (500, 1850, 2300, 2100)
    ]
    assert set(re.findall(r'class="limit" style="left:([\d.]+)%', html)) == {"86.957"}
    assert re.findall(r'class="beyond" style="left:86.957%;width:([\d.]+)%', html) == [
        "13.043",
        "4.348",
    ]


def test_what_users_wrote_is_text(bill: MemoryTable) -> None:
    hostile = '<script>alert("x")</script>'
    page = Picture(hostile, [(hostile, hostile)], bill, TIGHT)
    assert "<script" not in page.to_html()
    assert Reader(page.to_html()).text.count(hostile) == 4  # title, heading, name, value


def test_the_page_is_whole_and_small(full_bill: MemoryTable) -> None:
    html = picture(full_bill).to_html()
    page = Reader(html)
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert links == ["data:,"]
    assert "//" not in html
    assert len(html) < 30_000


def test_nothing_is_overwritten(bill: MemoryTable, tmp_path: Path) -> None:
    path = tmp_path / "bill.html"
    path.write_text("mine")
    for write in (lambda: write_picture(path, picture(bill)), lambda: check_picture_path(path)):
        with pytest.raises(ConfigError, match=r"bill\.html is there already; give another file"):
            write()
    assert path.read_text() == "mine"
    dangling = tmp_path / "link.html"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is there already"):
        write_picture(dangling, picture(bill))
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["bill.html", "link.html"]


def test_folders_are_made(bill: MemoryTable, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "bill.html"
    check_picture_path(path)
    assert not path.parent.exists()
    write_picture(path, picture(bill))
    assert [p.name for p in path.parent.iterdir()] == ["bill.html"]
    assert path.stat().st_mode & 0o777 == (tmp_path / "new").stat().st_mode & 0o666


def test_a_path_that_cannot_be_is_said_to_be_so(bill: MemoryTable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file, not a folder"):
        write_picture(tmp_path / "file" / "bill.html", picture(bill))
    with pytest.raises(ConfigError, match=r"cannot be written: .*too long"):
        write_picture(tmp_path / ("x" * 300), picture(bill))


@pytest.mark.parametrize("step", ["write_text", "rename"])
def test_a_full_disk_leaves_nothing(
    bill: MemoryTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fails(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, step, fails)
    with pytest.raises(ConfigError, match=r"cannot be written: .*No space left"):
        write_picture(tmp_path / "bill.html", picture(bill))
    assert list(tmp_path.iterdir()) == []


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
browser = next(filter(None, map(shutil.which, BROWSERS)), None)
_MEASURE = """
<script>
const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.right]; };
const all = (root, what) => [...root.querySelectorAll(what)];
// A headless window has the focus sooner or later or never, so the rule is read, not triggered.
const shows = all(document, ".tip").every(tip => getComputedStyle(tip).display === "none")
  ? [...document.styleSheets[0].cssRules].filter(rule => rule.style?.display === "block" &&
      rule.selectorText === ".segment:hover .tip, .segment:focus .tip").length : "always";
const measured = {
  rows: all(document, ".row").map(row => ({
    track: box(row.querySelector(".track")),
    segments: all(row, ".segment").map(s => [...box(s), getComputedStyle(s).backgroundColor]),
    limit: all(row, ".limit").map(box),
    height: row.getBoundingClientRect().height,
  })),
  tips: [shows, all(document, ".segment").every(segment => segment.tabIndex === 0)],
  overflow: document.documentElement.scrollWidth - window.innerWidth,
};
const out = document.createElement("pre");
out.id = "measured"; out.textContent = JSON.stringify(measured);
document.body.append(out);
</script>
"""


def in_browser(page: Path, profile: Path, width: int) -> dict[str, Any]:
    """What Chromium made of the page, which must give it nothing to complain about."""
    assert browser is not None
    quiet = ["gpu", "quic", "background-networking", "component-update", "sync"]
    result = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--no-first-run", "--enable-logging=stderr"]
        + [f"--disable-{what}" for what in quiet]
        + [f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in result.stderr
    found = re.search(r'<pre id="measured">(.*?)</pre>', result.stdout)
    assert found is not None, result.stdout
    measured: dict[str, Any] = json.loads(found[1])
    return measured


@pytest.mark.skipif(browser is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [500, 1200])
def test_chromium_shows_the_bars(bill: MemoryTable, tmp_path: Path, width: int) -> None:
    path = tmp_path / "bill.html"
    path.write_text(picture(bill).to_html().replace("</body>", f"{_MEASURE}</body>"))
    measured = in_browser(path, tmp_path / "profile", width)
    assert measured["overflow"] <= 0
    assert measured["tips"] == [1, True]
    backward = measured["rows"][2]
    left, right = backward["track"]
    assert right - left > 300
    assert backward["height"] > 20
    place = left
    for kind, count in sorted(
        bill.peaks[Phase.BACKWARD][Tier.DEVICE].items(), key=lambda item: list(Kind).index(item[0])
    ):
        begin, end, colour = backward["segments"].pop(0)
        assert begin == pytest.approx(place, abs=2)
        place += count / (2300 * MIB) * (right - left)
        assert end == pytest.approx(place, abs=2)
        red, green, blue = (int(LOOKS[kind].colour[i : i + 2], 16) for i in (1, 3, 5))
        assert colour == f"rgb({red}, {green}, {blue})"
    [[limit, _]] = backward["limit"]
    assert limit == pytest.approx(left + 2000 / 2300 * (right - left), abs=2)
    assert measured["rows"][4]["segments"] == []  # the host holds nothing while loading
    assert measured["rows"][5]["limit"] == []  # far beyond the peak
