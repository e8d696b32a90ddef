"""``python -m hpctrain``."""

import sys

from hpctrain.signals import listen

if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] == "train" or sys.argv[1].startswith("-"):
        listen()  # before anything slow is imported: a notice may come at any moment
    from hpctrain.cli import main

    sys.exit(main())
