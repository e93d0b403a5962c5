"""``aftserve key``."""

from collections.abc import Sequence

from aftexport.cli.options import make_parser


def run(words: Sequence[str]) -> int:
    """Makes an API key; returns the exit status."""
    parser = make_parser(
        "aftserve key",
        "Make an API key: it is printed once, and its digest for --api-keys FILE.",
    )
    parser.add_argument("name", metavar="NAME", help="of who is to have it")
    parser.add_argument("rate", metavar="RATE", nargs="?", help="such as 60/minute; any without")
    parser.add_argument("--admin", action="store_true", help="it may ask for POST /reload")
    options = parser.parse_args(words)

    from aftserve.api.api_keys import make_key

    key, section = make_key(options.name, options.rate, admin=options.admin)
    print(f"For {options.name}, shown this once:\n\n{key}\n\nFor the server's file:\n\n{section}")
    return 0
