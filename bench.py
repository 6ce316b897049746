"""Run `nanoserve bench` from a clone of the repository: python bench.py --help"""

import sys

from nanoserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
