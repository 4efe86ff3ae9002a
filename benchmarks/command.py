"""What the commands have in common."""

import argparse
import sys


def make_parser(description: str | None, repetitions: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=repetitions,
        help="how often the figure is measured (default: %(default)s)",
    )
    parser.add_argument(
        "--images",
        metavar="ROOT",
        default="",
        help="train on the images below ROOT/train/CLASS and ROOT/test/CLASS, of 32x32 "
        "pixels in ten classes, instead of random ones",
    )
    return parser


def say(text: str) -> None:
    """Tell a person what is going on, where it does not mix with the figures."""
    print(text, file=sys.stderr, flush=True)
