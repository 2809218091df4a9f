"""Makes the option styles of the source documents readable for the parser, before it sees them."""

import re
from collections.abc import Sequence

# Options that take several values after one name, as argparse's nargs="+" does.
SEVERAL_VALUES = frozenset({"--implementations", "--sequence-lengths", "--custom-lengths"})

_OPTION = re.compile(r"--?[A-Za-z]")


def spread(argv: Sequence[str]) -> list[str]:
    """`--implementations a b` becomes `--implementations a --implementations b`, and `--batch_size` `--batch-size`.

    Everything after a bare `--` is left alone.
    """
    spelt: list[str] = []
    repeated: str | None = None
    for index, word in enumerate(argv):
        if word == "--":
            return [*spelt, *argv[index:]]
        if _OPTION.match(word):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            repeated = name if name in SEVERAL_VALUES and not equals else None
            spelt.append(name + equals + value)
        elif repeated and spelt[-1] != repeated:
            spelt += [repeated, word]
        else:
            spelt.append(word)
    return spelt
