import sys

from nanoserve.cli.main import main

sys.exit(main())
