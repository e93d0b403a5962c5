"""``aftserve key``."""

from collections.abc import Sequence

from aftexport.system.arguments import make_parser


def run(words: Sequence[str]) -> int:
    """Make an API key; return the exit status."""
    parser = make_parser(
        "aftserve key",
        "Make an API key. Print the key, once, and its digest for the file of --api-keys.",
    )
    parser.add_argument("name", metavar="NAME", help="name of its owner")
    parser.add_argument(
        "rate",
        metavar="RATE",
        nargs="?",
        help="maximum rate of requests, such as 60/minute (default: no limit)",
    )
    parser.add_argument(
        "--tokens", metavar="RATE", help="maximum rate of tokens, such as 200000/minute"
    )
    parser.add_argument(
        "--seconds",
        metavar="RATE",
        help="maximum rate of the engine's predicted seconds, such as 20/minute",
    )
    parser.add_argument(
        "--admin", action="store_true", help="allow to load, reload and unload models"
    )
    options = parser.parse_args(words)

    from aftserve.api.api_keys import make_key

    key, section = make_key(
        options.name,
        options.rate,
        tokens=options.tokens,
        seconds=options.seconds,
        admin=options.admin,
    )
    print(f"API key of {options.name}, shown only once:\n\n{key}\n")
    print(f"Section for the file of --api-keys:\n\n{section}")
    return 0
