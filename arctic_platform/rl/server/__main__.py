"""`python -m arctic_platform.rl.server`: the command `arctic-rl serve`."""

import sys

from arctic_platform.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
