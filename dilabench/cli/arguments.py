"""Option styles and names of other documents and tools, and how the parser treats them."""

import re
from collections.abc import Sequence

# Options that take several values after one name, as argparse's nargs="+" does.
SEVERAL_VALUES = frozenset({"--implementations", "--sequence-lengths", "--custom-lengths"})


class OldNames(tuple[str, ...]):
    """Names of an option in other benchmarks and older scripts: accepted, but not shown by --help.

    They are part of the option's annotation: `Annotated[str, typer.Option("--dtype"), OldNames(["--precision"])]`.
    """

    __slots__ = ()


# Options of other tools that dilabench lacks, with their replacement.
INSTEAD = {
    "--segment-lengths": "--set segment_lengths=2048,4096",
    "--dilation-rates": "--set dilation_rates=1,2",
    "--causal": "--set causal=true",
    "--no-causal": "--set causal=false",
    "--window-size": "--set window=512,0",
    "--backward": "--mode backward, or --mode both",
    "--forward-only": "--mode forward",
    "--profile": "--timing profiler",
    "--test-flash": "-b flash2",
    "--test-sdpa": "-b sdpa-flash",
    "--test-xformers": "-b xformers",
    "--test-ring": "dilabench run ring --nproc 2",
    "--quick": "dilabench run quick",
    "--list-implementations": "dilabench list implementations",
    "--list-backends": "dilabench list backends",
    "--save-results": "no option: every run writes run.json, report.md and report.html",
    "--save": "no option: every run writes run.json, report.md and report.html",
    "--plot": "no option: every run writes its plots",
    "--csv": "dilabench report latest -f csv",
    "--master-port": "torchrun ... -m dilabench run ring",
}

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
