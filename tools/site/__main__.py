"""Build the documentation site: `python -m tools.site`, which `make docs` runs.

The pages of `docs/` and the generated reference pages are copied to one directory, which Sphinx builds. Every warning,
such as a link to a missing page or heading, is an error.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from sphinx.cmd.build import build_main

from tools.site.pages import DOCS, ROOT, stage_pages
from tools.site.reference import write_reference

SITE: Final = ROOT / "build/site"
CONFIGURATION: Final = """\
project = "Oncelog"
author = "The Oncelog developers"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Oncelog"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# Quotes and dashes stay as they are: many texts contain commands.
smartquotes = False
# Pages load nothing from other hosts, so the site works without a network.
html_theme_options = {"footer_icons": []}
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]
"""


def build_site(docs: Path, target: Path) -> int:
    """Build the site of the pages in `docs` into `target` and return Sphinx's exit status."""
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        pages = Path(temporary)
        stage_pages(docs, pages)
        write_reference(pages / "reference" / "generated")
        (pages / "conf.py").write_text(CONFIGURATION, encoding="utf-8")
        options = ["-b", "html", "-W", "--keep-going", "-q", "-d", str(pages / "doctrees")]
        return build_main([*options, str(pages), str(target)])


def main() -> int:
    """Build the site with the options of the command line."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--docs", type=Path, default=DOCS, help="directory of the pages (default: docs)")
    parser.add_argument("target", type=Path, nargs="?", default=SITE, help="directory to write (default: build/site)")
    options = parser.parse_args()
    status = build_site(options.docs.resolve(), options.target)
    if status == 0:
        print(f"Open {options.target / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
