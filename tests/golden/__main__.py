"""Record behaviour: `make golden`, or, with options, `PYTHONPATH=tests python -m golden`.

python -m golden                    compare the golden files with current behaviour
python -m golden --write            write the files that differ
python -m golden --write openapi    write only the files of the given recorders
"""

import argparse
import sys
import tempfile
from pathlib import Path

from databases import stop_server
from golden import golden_files
from golden.recorders import RECORDERS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__.partition("\n")[0])
    parser.add_argument("recorders", nargs="*", metavar="RECORDER", help=f"default: all of {', '.join(RECORDERS)}")
    parser.add_argument("--write", action="store_true", help="write the files that differ")
    options = parser.parse_args()
    unknown = [name for name in options.recorders if name not in RECORDERS]
    if unknown:
        parser.error(f"unknown recorder {unknown[0]!r}; choose from {', '.join(RECORDERS)}")
    found = ""
    written: set[str] = set()
    try:
        for name in options.recorders or RECORDERS:
            with tempfile.TemporaryDirectory(prefix="oncelog-golden-") as directory:
                recorded = RECORDERS[name](Path(directory))
            written |= recorded.keys()
            if not options.write:
                found += golden_files.differences(recorded)
            for changed in golden_files.write(recorded) if options.write else ():
                print(f"{name}: wrote tests/golden/files/{changed}", flush=True)
    finally:
        stop_server()
    if options.write and not options.recorders:
        for path in set(golden_files.FILES.iterdir()) - {golden_files.FILES / name for name in written}:
            path.unlink()
            print(f"removed tests/golden/files/{path.name}, which no recorder writes")
    if found:
        print(f"{found}\n\n{golden_files.REGENERATE}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
