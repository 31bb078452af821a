"""The lessons as pages that open from disk and from any static host.

    ./run.sh site
    python site/book.py [FOLDER] [--films NAMES]    (default: docs/site, films of every lesson)

A lesson's page has its docstring, its code, its results, the film of a step, and what differs from its
neighbour, the first lesson that its docstring names. README and docs are pages, too. Only films and search
need JavaScript.

Films, of the lesson and of its naive version, are made here, by tools/ledger.py on 4 ranks, and kept in
runs/films until the lesson changes. --films none makes none, --films ddp,zero3 only these. As root, on Linux,
each rank is on a host of its own (bench/hosts.sh), and these hosts have links of 1 Gbit/s.
"""

import argparse
import ast
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from html import unescape
from itertools import groupby, pairwise
from pathlib import Path

import jinja2
import markdown
import markdown.extensions.toc
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import run  # noqa: E402
from lessons import lessons, special  # noqa: E402

PAGES, FILMS = ROOT / "site/pages", ROOT / "runs/films"
LESSONS = lessons()
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "docs/results").glob("*.md"))
ADDRESSES = {ROOT / path: f"{name}.html" for name, path in LESSONS.items()}  # {file: its page}
ADDRESSES |= {path: f"{path.stem}.html" for path in DOCS} | {DOCS[0]: "index.html"}
ADDRESSES |= {path: f"results-{path.stem}.html" for path in RESULTS}
TITLES = {ADDRESSES[path]: path.read_text().split("\n")[0].lstrip("# ") for path in DOCS + RESULTS}
FILMED = "--layers 4 --width 256 --context 64 --batch 16 --steps 2"
SENDS = re.compile(r"\bdist\.(all_|broadcast|reduce|i?send|i?recv|batch)|\.copy_\(.*non_blocking")

# ---- text ----


def linked(text):
    """Plain text as HTML, with links to the papers and the lessons that it names."""
    html = str(escape(text))
    html = re.sub(r"(?:arXiv\s)?\b(\d{4}\.\d{5})\b", r'<a href="https://arxiv.org/abs/\1">\g<0></a>', html)
    html = re.sub(rf"\b({'|'.join(LESSONS)})\.py\b", r'<a href="\1.html">\g<0></a>', html)
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", html))


def prose(source, path, target):
    """Markdown as HTML. A link to a file with a page leads there, one to another file to a copy of it."""

    def link(match):
        kind, address, place = match.groups()
        file = (path.parent / address).resolve()
        if address and "//" not in address and file not in ADDRESSES and file.is_file():
            (target / "files").mkdir(exist_ok=True)
            ADDRESSES[file] = f"files/{file.relative_to(ROOT).as_posix().replace('/', '-')}"
            shutil.copy(file, target / ADDRESSES[file])
        return f'{kind}="{ADDRESSES.get(file, address) if address else ""}{place}"'

    toc = markdown.extensions.toc.TocExtension(permalink="#", permalink_title="link to this part")
    html = markdown.markdown(source, extensions=["tables", "fenced_code", toc])
    return Markup(re.sub(r'\b(href|src)="([^"#]*)((?:#[^"]*)?)"', link, html))


def sections(docstring):
    """(heading, remark, [(kind, lines)]) of each section of a lesson's docstring."""
    found = re.split(r"^(\w[\w ]*?)( \(.*)?\n(?=    )", docstring, flags=re.M)[1:]
    for heading, remark, body in zip(found[::3], found[1::3], found[2::3]):
        lines = [line[4:] for line in body.strip("\n").split("\n")]
        yield heading, remark or "", [(name, [*own]) for name, own in groupby(lines, partial(kind, heading))]


def kind(heading, line):
    if heading == "Run":
        return "verbatim"
    if line.count("|") > 2:
        return "timeline"
    if "  " not in line:
        return "prose"
    return "verbatim" if heading == "Timeline" else "table"


def timeline(lines):
    """(each column's percentage, [(label, [(text, how many columns)])]) of an ASCII timeline."""
    end = max(len(line.removesuffix("|")) for line in lines)
    bars = [sorted({end, *(match.start() for match in re.finditer(r"\|", line))}) for line in lines]
    edges = sorted(set().union(*bars))
    found = []
    for line, own in zip(lines, bars):
        cells = [(line[a + 1 : b].strip(), edges.index(b) - edges.index(a)) for a, b in pairwise(own)]
        found.append((line[: own[0]], cells))
    return [100 * (b - a) / (end - edges[0]) for a, b in pairwise(edges)], found


def results_of(name, target):
    """{page of results that names the lesson: its rows and tables there, as HTML}, each row once."""
    found, seen = {}, set()
    begins = re.compile(rf"(\| )?{name}(\.py)?\b").match
    for path in RESULTS:
        text, html = path.read_text(), ""
        for block, table in re.findall(r"^```\n(.*?)\n```$|((?:^\|.*\n)+)", text, re.M | re.S):
            for part in (block or table).split("\n\n"):
                head, *lines = part.rstrip("\n").split("\n")
                rows = lines if begins(head) else [row for row in lines if begins(row) and row not in seen]
                seen.update(rows)
                if rows and table:
                    html += str(prose("\n".join([head, lines[0], *rows]), path, target))
                elif rows:
                    html += "<pre>\n{}</pre>".format(escape("\n".join([head, *rows])))
        if html or re.search(rf"^#.*\b{name}\.py", text, re.M):
            found[ADDRESSES[path]] = Markup(html)
    return found


# ---- code ----


def code_lines(source):
    """A Python file's lines as HTML."""
    html = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    plain = r'<span class="(?:n|p|o|w|nn|nb|bp|fm|vm|ow|si|se|sa)">([^<]*)</span>'
    return re.sub(plain, r"\1", html).split("\n")[:-1]


def code_begins(source):
    """The number of the first line after the docstring and empty lines."""
    return ast.parse(source).body[1].lineno


def cut(source):
    """(title, first line, last line) of each part of a lesson's code, counted from 1."""
    lines = source.split("\n")[:-1]
    marks = [i for i, line in enumerate(lines, 1) if line.startswith("# ====")]
    begins = {"": code_begins(source), "The toy model: the same lines in every lesson": marks[0]}
    begins |= {"The end": marks[1] + 1} if marks[1:] else {}
    for (title, begin), (_, after) in pairwise([*begins.items(), ("", len(lines) + 1)]):
        numbers = [i for i in range(begin, after) if lines[i - 1]]  # but empty ones before and after
        yield title, numbers[0], numbers[-1]


def neighbour(source, name):
    """The first lesson that the docstring names, if it is another one."""
    first = re.search(r"\b(\w+)\.py\b", ast.get_docstring(ast.parse(source)))
    return first[1] if first and first[1] in LESSONS and first[1] != name else None


def changes(old, new):
    """[(kind, lines of old, lines of new)] of two files' code; kind: changed, equal or folded."""
    texts = [text.split("\n")[code_begins(text) - 1 : -1] for text in (old, new)]
    left, right = (code_lines(text)[code_begins(text) - 1 :] for text in (old, new))
    for tag, a, b, c, d in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        if tag != "equal":
            yield "changed", left[a:b], right[c:d]
            continue
        head, tail = min(b, a + 2 * (a > 0)), max(a, b - 2 * (b < len(left)))
        for how, i, j in (("equal", a, head), ("folded", head, tail), ("equal", max(head, tail), b)):
            if i < j:
                yield how if j - i > 4 else "equal", left[i:j], right[c + i - a : c + j - a]


# ---- films ----


def film_of(name, naive=False):
    """The film of a step, from runs/films or made now. naive: of the naive version."""
    launcher, *own = special(name, "RUN", "torchrun LESSON").replace(" LESSON", "").split()
    flags = [*FILMED.split(), *("4" if word == "N" else word for word in own), *special(name, "FILM").split()]
    flags += special(name, "NAIVE").split() * naive
    link = os.environ.get("LINK") if launcher == "torchrun" else None
    texts = [path.read_text() for path in (ROOT / LESSONS[name], ROOT / "tools/film.py")]
    key = hashlib.sha256("\n".join([*texts, str(link), *flags]).encode()).hexdigest()[:12]
    path = FILMS / f"{name}{'-naive' * naive}-{key}.json"
    if not path.exists():
        FILMS.mkdir(parents=True, exist_ok=True)
        print(f"film of {name} {special(name, 'NAIVE') * naive} ...", flush=True)
        for old in FILMS.glob(f"{name}{'-naive' * naive}-{'?' * 12}.json"):
            old.unlink()
        words = ["--film", str(path), LESSONS[name], *flags]
        if not run.run("film", "tools/ledger.py", words, 4 if launcher == "torchrun" else None):
            path.unlink(missing_ok=True)
            sys.exit(f"no film of {name}: see runs/film.log")
    return json.loads(path.read_text()) | {"link": link}


# ---- pages ----


def search_index(pages):
    """(address, title of the page, heading, text) of each part of the pages, {address: HTML}."""
    for name, html in pages.items():
        title = unescape(re.search("<title>(.*?)(?: \\| rankzero)?</title>", html)[1])
        main = html[html.index("</nav>") : html.index("<footer>")]
        main = re.sub(r'(?s)<a class="headerlink".*?</a>|<(pre|section)\b.*?</\1>', "", main)
        _, *parts = re.split(r"(?s)<h[1-3](.*?)</h[1-3]>", main)
        for head, body in zip(parts[::2], parts[1::2]):
            place = re.match(r' id="([^"]*)"', head)
            words = unescape(re.sub(r"<[^>]*>", "", "<h" + head)).strip("# \n")
            text = " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())
            yield name + (f"#{place[1]}" if place else ""), title, words or title, text


def build(target, filmed):
    """Write the site to a folder, with films of these lessons."""
    target.mkdir(parents=True, exist_ok=True)
    loader = jinja2.FileSystemLoader(PAGES)
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.globals |= globals()
    pages = {}

    def write(address, template, **content):
        pages[address] = templates.get_template(template).render(address=address, **content)
        (target / address).write_text(pages[address])

    for path in DOCS + RESULTS:
        address = ADDRESSES[path]
        write(address, "base.html", title=TITLES[address], text=prose(path.read_text(), path, target))
    for name, path in LESSONS.items():
        source = (ROOT / path).read_text()
        says, _, docstring = ast.get_docstring(ast.parse(source)).partition("\n")
        content = {"name": name, "path": path, "says": says, "sections": list(sections(docstring))}
        content |= {"lines": code_lines(source), "parts": list(cut(source)), "old": neighbour(source, name)}
        content["plain"] = ["", *source.split("\n")]
        content["results"] = results_of(name, target)
        content["film"] = film_of(name) if name in filmed else None
        if content["film"] and special(name, "NAIVE"):
            content["film"]["naive"] = film_of(name, naive=True)
        if content["old"]:
            content["changes"] = list(changes((ROOT / LESSONS[content["old"]]).read_text(), source))
        if content["film"]:
            film = json.dumps(content["film"], separators=(",", ":"))
            (target / f"film-{name}.js").write_text(f"const FILM = {film};\n")
        write(f"{name}.html", "lesson.html", title=f"{name}.py", **content)
    index = json.dumps(list(search_index(pages)), ensure_ascii=False, separators=(",", ":"))
    (target / "search-index.js").write_text(f"window.INDEX = {index};\n")
    for path in [PAGES / "style.css", *PAGES.glob("*.js")]:
        shutil.copy(path, target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs/site")
    parser.add_argument("--films", default=",".join(LESSONS))
    given = parser.parse_args()
    chosen = [] if given.films == "none" else given.films.split(",")
    if unknown := set(chosen) - LESSONS.keys():
        parser.error(f"--films: no lesson {', '.join(unknown)}")
    hosts = ["bench/hosts.sh", "4", "1gbit", "--within"]
    os.chdir(ROOT)
    if (
        chosen
        and "LINK" not in os.environ
        and not subprocess.run([*hosts, "true"], capture_output=True).returncode
    ):
        os.environ |= {"LINK": "1gbit", "PYTHON": sys.executable}
        os.execv(hosts[0], [*hosts, sys.executable, *sys.argv])
    build(given.folder.resolve(), chosen)
