"""The lessons as pages: what site/book.py writes, as text and in a browser."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape

import html5lib
import pytest

from tests.harness import ROOT, load
from tests.test_pipeline import in_flight

ACCESSIBLE = (ROOT / "tests/accessible.js").read_text().partition("\n")[2]
SAID = """1f1b: 27.3 % idle; in flight on ranks 0 to 3: 4, 3, 2, 1
A rank holds 15.5 + 0.469 + 0.938 GB of parameters, gradients and optimizer, and sends 29.5 GB in a step."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of a copy of the repository that has another zero2.py."""
    copy = tmp_path_factory.mktemp("site") / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "tests", "__pycache__"))
    source = (copy / "zero2.py").read_text()
    (copy / "zero2.py").write_text(source.replace("backward frees", "backward <edited> & frees", 1))
    subprocess.run([sys.executable, "site/book.py"], cwd=copy, check=True)
    return copy / "docs/site"


def text_of(html):
    return unescape(re.sub(r"<[^>]*>", "", html))


def squeezed(text):
    return "".join(text.split())


def docstring_and_code(site, name):
    return (site.parents[1] / f"{name}.py").read_text().split('"""', 2)[1:]


def test_a_page_has_its_lessons_words_code_and_numbers_as_they_are_now(site):
    run, speed = ((ROOT / f"docs/results/{name}.md").read_text() for name in ("run", "speed"))
    lessons = list(load("site/book").LESSONS)
    assert len(lessons) == 28
    for name in lessons:
        docstring, code = docstring_and_code(site, name)
        page = (site / f"{name}.html").read_text()
        words = squeezed(text_of(page))
        expected = re.split(r" {2,}|\||\n", docstring)
        cells = re.split(r" {2,}", re.findall(rf"^{name}  .*", run, re.M)[-1])
        measured = zip(("parameters", "gradients", "optimizer", "activations", "sent in a step"), cells[4:])
        expected += [what + cell.replace("/", "") for what, cell in measured if cell != "-"]
        expected += [f"loss {cells[2]}, {cells[9]} ms"]
        peers = rf"^\| {name}\.py(.*?) \| (.+) \| ([\d.; ]+) \| ([\d.; ]*?) ?\|$"
        for which, peer, one, two in re.findall(peers, speed, re.M):
            expected.append(f"{peer}({which[2:]}){one}{two}".replace("()", ""))
        missing = [text for text in expected if squeezed(text.replace("`", "")) not in words]
        assert not missing, f"{name}.html lacks {missing}"
        shown = text_of("".join(re.findall(r"<pre[^>]*>(<i .*?)</pre>", page, re.S)))
        assert squeezed(shown) == squeezed(code), f"{name}.html has other code"
        lines = ["", *f'"""{docstring}"""{code}'.split("\n")]
        for number, what in re.findall(r'href="#L(\d+)">(?:<code>)?([\w-]+)<', page):
            found = what.replace("-", "_") in lines[int(number)]
            assert found, f"{name}.html: {what} is not in line {number}"
        following = re.findall(r'rel="next" href="(\w+)', page)
        assert following == lessons[lessons.index(name) + 1 :][:1], f"{name}.html leads to {following}"
        figures = re.findall(r'src="(.*?)\.svg" alt="(.*?)"', page)
        unsaid = [figure for figure, alt in figures if len(alt) < 20]
        assert not unsaid, f"{name}.html does not say what {unsaid} show"
    marked = re.findall(r'class="sends"></i>.*?\b(all_\w+|broadcast)', (site / "zero2.html").read_text())
    calls = "broadcast all_reduce all_gather all_to_all_single all_reduce"  # or a reduce_scatter
    assert " ".join(marked) == calls, marked


def test_a_difference_is_that_of_the_two_files(site):
    for old, new, _ in load("site/book").CHANGES:
        page = (site / f"{old}-{new}.html").read_text()
        pieces = re.findall(r'<pre(?: class="(\w+)")?[^>]*>\n(.*?)</pre>', page, re.S)
        equal = []
        sides = (old, "new", r"(\d+) lines of code go"), (new, "old", r"go, (\d+) come")
        for name, other, changed in sides:
            found = text_of("".join(piece for side, piece in pieces if side != other))
            docstring, code = docstring_and_code(site, name)
            assert found == f'{code[1:]}"""{docstring}"""\n', f"{old}-{new}.html has another {name}.py"
            equal.append(code.count("\n") - 1 - int(re.search(changed, page)[1]))
        assert equal[0] == equal[1] > 130, f"{old}-{new}.html counts other lines"


def test_pages_are_valid_and_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    index = json.loads((site / "search-index.js").read_text().removeprefix("window.INDEX = ").rstrip(";\n"))
    pages["search-index.js"] = " ".join(f'href="{address}"' for address, *_ in index)
    for name, page in pages.items():
        if name.endswith("html"):
            html5lib.HTMLParser(strict=True).parse(page)
        ids = re.findall(r'\bid="([^"]*)"', page)
        assert len(ids) == len(set(ids)), f"{name} has an id twice"
        for kind, link in re.findall(r'(href|src)="([^"]*)"', page):
            file, _, place = link.partition("#")
            if kind == "src" or not re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}|data:,", link):
                assert (site / (file or name)).is_file(), f"{name}: {link}"
                assert not place or f'id="{place}"' in pages[file or name], f"{name}: {link}"
    size = sum(path.stat().st_size for path in site.iterdir())
    assert size < 5.1e6  # blocks of figures say how they were made


def test_the_explorers_show_what_the_lessons_and_plan_py_compute(site):
    data = (site / "explore-data.js").read_text()
    schedules, memory = (json.loads(line.split(" = ")[1]) for line in data.splitlines())
    for file, names in load("site/book").SCHEDULES.items():
        for key in (key for key in schedules if key.split()[0] in names):
            name, stages, microbatches, chunks = key.split()
            if int(microbatches) % int(stages) and name == "interleaved":
                assert schedules[key] == "n_microbatches must be a multiple of n_ranks"
                continue
            schedule = load(file).build_schedule(
                name, int(stages), int(microbatches), *[int(chunks)] * (chunks > "1")
            )
            for words, actions in zip(schedules[key]["ranks"], schedule):
                named = " ".join(f"{op}{k}.{stage // int(stages)}" for op, stage, k in actions)
                assert re.sub(r"-\S+ ", "", words) == re.sub(r"\.0\b", "", named), key
            assert schedules[key]["inFlight"] == list(map(in_flight, schedule)), key
            idle = [-sum(map(float, re.findall(r" (-\S+)", words))) for words in schedules[key]["ranks"]]
            bubble = max(idle) / (3 * int(microbatches) + max(idle))
            assert abs(schedules[key]["idle"] - bubble) < 1e-4, f"{key}: not its bubble"
    sums = [f"{sum(row[:3]) / 1e9:.3g} {row[3] / 1e9:.3g}" for row in memory["7.5b 64"]]
    assert sums == ["120 29.5", "31.9 29.5", "16.9 29.5", "1.88 44.3"]  # zero1, zero2: Figure 1 + 4P/N, 2P/N


def test_who_holds_what_is_what_was_measured():
    book = load("site/book")
    drawn = {"w": (0.97, 9), "c": (0.2, 0.4), "r": (0.2, 0.4), "m": (0.2, 0.35), "u": (0.35, 0.9)}
    drawn |= {"y": (0.3, 0.5), "e": (2.4, 2.8), "h": (0, 0), "o": (0.1, 0.2)}  # e: of a larger model, in fp64
    drawn |= {"k": (2.4, 3), "q": (1.5, 1.7)}  # of the same larger model
    drawn |= {"d": (0.45, 0.55), "f": (0.6, 0.95), "v": (0.2, 0.4)}
    for name, (letters, _) in book.PICTURES.items():
        ranks, _, *measured = book.MEASURED[name]
        parts = 2 if name == "diloco" else 3  # it has run with SGD
        for letter, own, whole in zip(letters, measured[:parts], book.MEASURED["single"][2:]):
            held = 0 if own == "-" else float(own.split()[0]) / float(whole.split()[0])
            held *= int(ranks) / 4 if letter in "cr" else 1  # resume.py has run on 2
            least, most = drawn[letter]
            assert least <= held <= most, f"{name}: {held:.2f} of single.py's, drawn as {letter}"


def test_the_numbers_on_rounding_and_its_broken_lessons_are_what_they_were_measured_with(tmp_path):
    rounding = load("bench/rounding")
    result = json.loads(rounding.RESULT.read_text())
    assert "\n".join(rounding.table(result)) == load("bench/pages").read()["rounding"]["text"]
    assert list(rounding.files(tmp_path)) == list(result["runs"])  # each broken line is there, once
    drawn = (ROOT / "docs/rounding.svg").read_text()
    missing = [name for name in rounding.MUTANTS if f"broken: {name}" not in drawn]
    assert not missing, f"docs/rounding.svg lacks {missing}"
    for dtype in rounding.DTYPES:  # what the page says in words
        runs = {name: run[dtype] for name, run in result["runs"].items() if name != rounding.FIRST}
        broken = {name: runs.pop(name) for name in rounding.MUTANTS}
        for name, run in runs.items():
            assert run["weights"][-1] > 10 * run["weights"][0], f"{name}, {dtype}"
        most = max(run["norm"][0] for run in runs.values())
        assert all(run["norm"][0] > 50 * most for run in broken.values()), dtype


def check_film(page, site):
    """Steps, keys, play and a click on a line lead to the moments that the film has, and mark its lines."""
    page.goto(f"{site.as_uri()}/zero3.html")
    film = json.loads((site / "film-zero3.js").read_text().partition(" = ")[2].rstrip(";\n"))
    rows = [row for what in ("spans", "messages", "waits") for row in film["lanes"]["rank 0"][what]]
    events = sorted({(row[0], film["lines"][row[2]][0]) for row in rows if row[0]})

    def moment():
        return page.inner_text(".film output")

    def said(time):
        return f"{time / 100:.1f} of {film['length'] / 100:.0f} ms"

    page.click(".film .forth")
    for key, (time, line) in (("ArrowRight", events[1]), ("ArrowRight", events[2]), ("ArrowLeft", events[1])):
        page.keyboard.press(key)
        assert moment() == said(time), f"{key} leads to {moment()}"
        assert "0" in page.get_attribute(f"#L{line}", "data-at").split(), f"line {line} is not marked"
    page.keyboard.press("Home")
    page.click(".film .play")
    page.wait_for_timeout(1000)
    page.click(".film .play")
    assert moment() != said(0), "it does not play"
    _, line = events[-1]
    time = min(first for first, where in events if where == line)
    page.click(f"#L{line} + span")
    assert moment() == said(time), "a click on a line leads elsewhere"
    picture = page.inner_html(".film .lanes")
    page.check(".film [type=checkbox]")
    assert page.inner_html(".film .lanes") != picture and moment() == said(time), "evenly spaced is the same"


def check_search_and_questions(page, site):
    page.fill("[type=search]", "watchdog timeout")
    page.click("#found a")
    assert "trouble.html#" in page.url, page.url
    page.goto(f"{site.as_uri()}/ten.html")
    for name, answers in {"ddp": "13 19.6", "zero1": "2 6.5", "zero3": "5 29"}.items():
        said = []
        for answer in answers.split():
            page.fill(f"#answer-{name}", answer)
            page.press(f"#answer-{name}", "Enter")
            said.append(page.inner_text(f"[for=answer-{name}] >> nth=1"))
        assert said[0].startswith("Too little.") and said[1].startswith("Right: "), f"{name}: {said}"


def check_return_and_anchor(page, site):
    """After a way back a picture is that of its controls; a link to a line leads there."""
    page.goto(f"{site.as_uri()}/explore.html")
    page.select_option("#schedule", "zb-v")
    page.goto(f"{site.as_uri()}/ten.html")
    page.go_back()
    chosen = page.input_value("#schedule")
    assert page.inner_text("#schedules .says").startswith(f"{chosen}: "), f"not a picture of {chosen}"
    for line in 100, 200:
        page.goto("about:blank")
        page.goto(f"{site.as_uri()}/zero3.html#L{line}")
        page.wait_for_timeout(500)  # for images that come late
        top = page.evaluate(f"document.getElementById('L{line}').getBoundingClientRect().top")
        menu = page.evaluate("document.querySelector('nav').getBoundingClientRect().bottom")
        assert max(0, menu) <= top + 1 < 700, f"line {line} is at {top}, the menu ends at {menu}"


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium")
def test_in_a_browser_every_page_opens_and_every_control_changes_its_picture(site):
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        errors, grounds = [], set()
        for width, scheme in ((1400, "light"), (320, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
            page.on("console", lambda message: errors.append(message.text))
            page.on("pageerror", lambda error: errors.append(str(error)))
            for path in site.glob("*.html"):
                page.goto(path.as_uri())
                assert page.evaluate("document.documentElement.scrollWidth") == width, f"{path} is wider"
                assert not page.evaluate(ACCESSIBLE), path
                assert not errors, f"{path}: {errors}"
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            page.goto(f"{site.as_uri()}/explore.html")
            assert page.locator(".says").all_inner_texts() == SAID.splitlines()  # 3 of 8 + 3
            drawn = [page.locator(f"#schedules .drawing .{what}").count() for what in "FBW"]
            assert drawn == [32, 32, 0], "another picture"
            for control in page.locator("main select, main input").all():  # a select's keys are up and down
                drawing = control.locator("xpath=ancestor::section").locator(".drawing")
                before = drawing.inner_html()
                control.press("ArrowRight" if control.get_attribute("type") else "ArrowDown")
                assert drawing.inner_html() != before, f"{control} changes nothing"
                assert not errors, f"{control}: {errors}"
            check_film(page, site)
            check_search_and_questions(page, site)
            check_return_and_anchor(page, site)
        assert len(grounds) == 2, "dark is as light"
        page = browser.new_page(java_script_enabled=False)
        page.goto(f"{site.as_uri()}/zero2.html")
        assert "backward <edited> & frees" in page.inner_text("main")
