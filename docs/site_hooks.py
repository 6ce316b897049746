"""Hooks for mkdocs that convert the repository's pages to pages of the site.

Numbers and tables are used as recorded, so building a site needs neither torch nor a model. Where a
site can show more than a plain view, that replaces the recorded text: runs to step through, source
with line numbers, collapsible boxes, links to the complete source file.
"""

import posixpath
import re
import shutil
import sys
from importlib.resources import files as package_files
from pathlib import Path
from textwrap import indent
from typing import Any

DOCS = Path(__file__).parent
for folder in (DOCS, DOCS.parent):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import facts  # noqa: E402
from quotes import is_piece, name_in_file, symbol_and_options  # noqa: E402
from regions import Region, replace_regions  # noqa: E402
from trace_pages import trace_page  # noqa: E402

_ALERT = re.compile(r"^> \[!(\w+)\]\n((?:>.*\n?)+)", re.M)
_FOLDED = re.compile(r"^<details markdown><summary>(.*?)</summary>\n(.*?)^</details>$", re.M | re.S)
_LINK = re.compile(r"(\]\()([^)\s:#]+)(\))")
_SOURCE = re.compile(r'href="source:([^"#]+)(#[^"]*)?"')
_shown: set[str] = set()  # runs and files that this build's pages link to
_sources: set[str] = set()


def on_pre_build(config: Any) -> None:
    """Clear the state of an earlier build in the same process."""
    _shown.clear()
    _sources.clear()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text in the Markdown of mkdocs, with its recorded values."""
    uri = page.file.src_uri
    text = replace_regions(markdown, lambda region: _on_the_site(region, page.file.url))
    text = _ALERT.sub(_admonition, text)
    text = _FOLDED.sub(lambda found: _box("???", "question", found[1], found[2]), text)
    return _LINK.sub(lambda found: f"{found[1]}{_to_source(found[2], uri)}{found[3]}", text)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links to source replaced by links to the pages of the files."""

    def relative(found: re.Match[str]) -> str:
        _sources.add(found[1])
        target = f"source/{found[1]}.html"
        return f'href="{_from_page(target, page.file.url)}{found[2] or ""}"'

    return _SOURCE.sub(relative, html)


def on_post_build(config: Any) -> None:
    """Write the recorded runs, the source files and the scripts for figures."""
    site = Path(config["site_dir"])
    for name in sorted(_shown):
        _write(site / "traces" / f"{name}.html", trace_page(name))
    for name in sorted(_sources):
        _write(site / "source" / f"{name}.html", _source_page(name))
    mermaid = package_files("mermaidx") / "assets" / "mermaid.js"
    shutil.copyfile(str(mermaid), site / "assets" / "mermaid.js")


def _on_the_site(region: Region, url: str) -> str:
    if region.symbol and not is_piece(symbol_and_options(region.said)[1]):
        return _quotation(region)
    if shown := re.fullmatch(r'trace\("(\w+)"\)', region.expression or ""):
        return _frame(shown[1], url)
    if region.value is None:
        raise ValueError(f"{region.said} has no value yet: run `python docs/record.py`")
    return region.prefix + region.value.strip() if region.is_block else region.value


def _quotation(region: Region) -> str:
    """Return the quotation for mkdocstrings, with a name that includes the class."""
    symbol, options = symbol_and_options(region.said)
    name = name_in_file(symbol)
    if "show_source" in options:
        return region.said
    said = region.said if options else f"{region.said}\n    options:"
    return f"{said}\n      heading: {name}\n      toc_label: {name}"


def _frame(name: str, url: str) -> str:
    """Return the frame that shows a run on the page at `url` of the site."""
    _shown.add(name)
    run = _from_page(f"traces/{name}.html", url)
    title = f"A recorded run: {name.replace('_', ' ')}"
    record = _from_page("index.html", url)
    return (
        f'<div class="trace"><iframe src="{run}" title="{title}" loading="lazy"></iframe>'
        f'<p><a href="{run}" target="_blank">The run in a window of its own</a>; '
        f'<a href="{record}#record-a-run-of-your-own">record one yourself</a></p></div>'
    )


def _admonition(found: re.Match[str]) -> str:
    lines = [line.removeprefix(">").removeprefix(" ") for line in found[2].splitlines()]
    body = "\n".join(lines)
    title, _, rest = body.removeprefix("**").partition("**")
    return _box("!!!", found[1].lower(), title.rstrip(".。"), rest.strip())


def _box(mark: str, kind: str, title: str, body: str) -> str:
    quoted = re.sub(r"</?code>", "`", " ".join(title.split())).replace('"', "'")
    return f'{mark} {kind} "{quoted}"\n\n{indent(body.strip(chr(10)), "    ")}\n\n'


def _to_source(target: str, uri: str) -> str:
    """Return the target of a link; files outside `docs/` and programs have source pages."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), target))
    is_page = path.startswith("docs/") and not path.endswith((".py", ".patch", ".jsonl"))
    if is_page or not (facts.ROOT / path).is_file():
        return target
    return f"source:{path}"


# Long lines scroll inside the table, so that the page is as wide as a phone.
_SOURCE_STYLE = """<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
.highlighttable { display: block; overflow-x: auto; }
@media (prefers-color-scheme: dark) {
body { background: #272822; color: #f8f8f2; }
td.linenos, td.linenos .normal, .linenos a { background: #272822; color: #8f908a; }
DARK
}
</style>
"""


def _source_page(name: str) -> str:
    """Return a file of the repository as a page, with an anchor for each line."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_for_filename
    from pygments.util import ClassNotFound

    text = (facts.ROOT / name).read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(name)
    except ClassNotFound:
        lexer = get_lexer_for_filename("plain.txt")
    look = {"linenos": "table", "lineanchors": "L", "anchorlinenos": True, "title": name}
    page = highlight(text, lexer, HtmlFormatter(full=True, style="default", **look))
    dark = HtmlFormatter(style="monokai").get_style_defs(".highlight")
    page = page.replace("</head>", _SOURCE_STYLE.replace("DARK", dark) + "</head>", 1)
    # Line 7 is #L7, as in the file views of repositories.
    return re.sub(r'((?:id|name|href)="#?L)-(\d+")', r"\1\2", page)


def _from_page(target: str, url: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(url) or ".")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
