"""The lessons as pages, as site/book.py writes them: as text, as films, and in a browser."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser

import pytest

from tests.harness import ROOT, load

ACCESSIBLE = (ROOT / "tests/accessible.js").read_text().partition("\n")[2]
LESSONS = load("tools/lessons").lessons()


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site of a copy of the repository that has another zero2.py, with two films; one for all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    copy = base / "site"
    with open(base / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not copy.exists():
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "site-packages"))
            shutil.rmtree(copy / "docs/site", ignore_errors=True)
            source = (copy / "zero2.py").read_text()
            (copy / "zero2.py").write_text(source.replace('"""ZeRO-2', '"""<xyzzy> & ZeRO-2', 1))
            command = [sys.executable, "site/book.py", "--films", "zero2,dp_threads"]
            subprocess.run(command, cwd=copy, check=True)
    return copy / "docs/site"


def text_of(html):
    return unescape(re.sub(r"<[^>]*>", "", html))


def squeezed(text):
    return "".join(text.replace("`", "").split())


def docstring_and_code(site, name):
    return (site.parents[1] / LESSONS[name]).read_text().split('"""', 2)[1:]


def data_in(path):
    return json.loads(path.read_text().partition(" = ")[2].rstrip(";\n"))


def test_a_page_has_its_lessons_words_code_and_results(site):
    for name, following in zip(LESSONS, [*LESSONS][1:]):
        docstring, code = docstring_and_code(site, name)
        page = (site / f"{name}.html").read_text()
        words = squeezed(text_of(page))
        missing = [text for text in re.split(r" {2,}|\||\n", docstring) if squeezed(text) not in words]
        assert not missing, f"{name}.html lacks {missing}"
        shown = text_of("".join(re.findall(r"<pre>(<i .*?)</pre>", page, re.S)))
        assert squeezed(shown) == squeezed(code), f"{name}.html has other code"
        assert re.findall(r'rel="next" href="(\w+)', page) == [following]
        results = "".join(path.read_text() for path in site.parent.glob("results/*.md"))
        rows = re.findall(rf"^{name}  +\d.*|^{name} --.*", results, re.M)
        assert all(squeezed(row) in words for row in rows), f"{name}.html lacks results"
    sends = re.findall(r'class="sends"></i>(.*)', (site / "ddp.html").read_text())
    assert sends and all("dist." in line for line in sends)


def test_a_difference_is_that_of_two_neighbours(site):
    neighbours = {"zero2": "zero1", "zero3": "zero2", "single": None, "pipeline_v": "zero_bubble"}
    for name in LESSONS:
        page = (site / f"{name}.html").read_text().partition('<h2 id="what-changes">')[2]
        old = re.search(r'class="pair heads"><h3><a href="(\w+).html', page)
        assert neighbours.get(name, old and old[1]) == (old and old[1]), f"{name} beside {old}"
        if old:
            pieces = re.findall(r'<pre(?: class="(\w+)")?>\n(.*?)</pre>', page, re.S)
            for lesson, other in (old[1], "new"), (name, "old"):
                found = text_of("".join(piece for side, piece in pieces if side != other))
                assert found.strip() == docstring_and_code(site, lesson)[1].strip(), f"{name}: other {lesson}"
            sides = r'"pair equal">\n<pre class="old">(.*?)</pre>\n<pre class="new">(.*?)</pre>'
            pairs = re.findall(sides, page, re.S)
            assert pairs and all(text_of(one) == text_of(two) for one, two in pairs), f"{name}: not equal"


class Tags(HTMLParser):  # each must be closed where it belongs
    def handle_startendtag(self, tag, attributes):
        pass

    def handle_starttag(self, tag, attributes):
        self.open += [tag] * (tag not in ("meta", "link", "input", "img", "col", "wbr", "br"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    docs = [*site.parent.glob("*.md"), *site.parent.glob("results/*.md")]
    assert len(pages) == len(LESSONS) + len(docs) + 1
    pages["index"] = " ".join(f'href="{address}"' for address, *_ in data_in(site / "search-index.js"))
    assert 'href="zero2.html#memory"' in pages["index"]
    for name, page in pages.items():
        tags = Tags()
        tags.open = []
        tags.feed(page)
        assert not tags.open, name
        ids = re.findall(r'\bid="([^"]*)"', page)
        assert len(ids) == len(set(ids)), f"{name} has an id twice"
        for tag, kind, link in re.findall(r'(?:<(\w+)[^<>]*? )?\b(href|src)="([^"]*)"', page):
            file, _, place = link.partition("#")
            if kind == "src" or tag == "link" or not re.match("https?://", link):
                assert link == "data:," or (site / (file or name)).is_file(), f"{name}: {link}"
                assert not place or f'id="{place}"' in pages[file or name], f"{name}: {link}"
    for path in [*site.glob("*.css"), *(site / file for file in ("film.js", "search.js"))]:
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import", path.read_text()), path


def test_a_film_shows_what_a_step_does_and_holds_and_by_which_lines(site):
    film = data_in(site / "film-zero2.js")
    lines = ["", *(site.parents[1] / LESSONS["zero2"]).read_text().split("\n")]
    order = ["F1", "F2", "F3", "F4", "B4", "B3", "B2", "B1", "O"]
    assert list(film["lanes"]) == [f"rank {rank}" for rank in range(4)]
    for name, lane in film["lanes"].items():
        computed = list(dict.fromkeys(what for *_, what in lane["spans"] if what[1:] or what == "O"))
        assert computed == order, f"{name}: {computed}"
        messages = lane["messages"]
        for begin, end, line, what, size, _ in messages:
            call = re.search(r"[a-z]+-[a-z]+(?=$| \()", what)[0].replace("-", "_")
            assert 0 <= begin <= end <= film["length"] and size and line
            assert call in lines[line] or "exchange(" in lines[line], f"{what} in line {line}"
        gathered = [size for *_, what, size, _ in messages if what == "all-gather"]
        reduced = [row for row in messages if "reduce-scatter" in row[3]]
        assert len(gathered) == len(reduced) == 5, f"{name}: not one of each unit"
        awaited = [number for *_, number in lane["waits"] if number >= 0]
        # All-gathers are waited for in the next step.
        here = {number for number, row in enumerate(messages) if row[3] != "all-gather"}
        assert here <= {*awaited} and len({*awaited}) == len(awaited), f"{name} does not wait once for each"
        held = {kind: size for _, _, kind, size in lane["held"]}  # at the end
        for kind, size in ("parameters", sum(gathered)), ("optimizer", 2 * sum(gathered) / 4):
            assert size <= held[kind] <= 1.3 * size, f"{name} holds {held[kind]} of {kind}, not {size}"
    for name, lane in data_in(site / "film-dp_threads.js")["lanes"].items():
        assert re.fullmatch("device [0-3]", name), name
        assert {what for *_, what in lane["spans"]} >= {*order[:-1]}, name


def test_a_film_is_made_again_when_its_lesson_has_changed(site, monkeypatch):
    book = load(str(site.parents[1] / "site/book"))
    monkeypatch.setattr(book.run, "run", lambda *_: False)
    film = data_in(site / "film-zero2.js")
    monkeypatch.setenv("LINK", film["link"] or "")
    assert book.film_of("zero2")["lanes"] == film["lanes"] != film["naive"]["lanes"]
    assert "--naive" in film["naive"]["flags"]
    monkeypatch.setitem(book.LESSONS, "zero2", "zero3.py")
    with pytest.raises(SystemExit, match="no film of zero2"):
        book.film_of("zero2")


def check_film(page, film):
    """Steps, keys, play and a click on a line lead to the moments that the film has, and mark its lines."""
    rows = [row for what in ("spans", "messages", "waits") for row in film["lanes"]["rank 0"][what]]
    at = {}  # {time: lines}: several things may happen at once
    for time, _, line, *_ in rows:
        at.setdefault(time, set()).add(line)
    times = sorted(filter(None, at))

    def said(time):
        return f"{time / 100:.1f} of {film['length'] / 100:.0f} ms"

    page.click(".film .forth")
    for key, time in (("ArrowRight", times[1]), ("ArrowRight", times[2]), ("ArrowLeft", times[1])):
        page.keyboard.press(key)
        assert page.inner_text(".film output") == said(time), key
        marks = [page.get_attribute(f"#L{line}", "data-at") or "" for line in at[time]]
        assert "0" in " ".join(marks).split(), f"none of lines {at[time]} is marked"
    page.keyboard.press("Home")
    page.click(".film .play")
    page.wait_for_timeout(500)
    page.click(".film .play")
    assert page.inner_text(".film output") != said(0), "it does not play"
    line = max(at[times[-1]])
    time = next(first for first in times if line in at[first])
    page.click(f"#L{line} + span")
    assert page.inner_text(".film output") == said(time), "a click on a line leads elsewhere"
    picture = page.inner_html(".film .lanes")
    page.check(".film [type=checkbox]")
    assert page.inner_html(".film .lanes") != picture, "evenly spaced is the same"


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium")
def test_in_a_browser_pages_are_readable_and_films_and_search_work(site):
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        errors = []
        for width, scheme in ((1400, "light"), (320, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
            page.on("console", lambda message: errors.append(message.text))
            page.on("pageerror", lambda error: errors.append(str(error)))
            for name in ("index", "trouble", "results-run", "single", "dp_threads", "zero2"):
                page.goto(f"{site.as_uri()}/{name}.html")
                assert page.evaluate("document.documentElement.scrollWidth") == width, f"{name} is wider"
                assert not page.evaluate(ACCESSIBLE), name
            check_film(page, data_in(site / "film-zero2.js"))
            page.fill("[type=search]", "xyz zero")
            page.click("#found a")
            assert "zero2.html" in page.url, page.url
            assert not errors, errors
