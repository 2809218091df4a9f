#!/usr/bin/env python3
"""Compares dilabench with transformers' eager attention in every model class of the installed transformers.

    python scripts/model_matrix.py                      # all families; writes docs/reference/models.md
    python scripts/model_matrix.py llama qwen3 --print  # some, as text

Models have random weights and few channels, in float64 where eager attention runs in it. A cell that differs, or that
raises anything but a refusal of dilabench by name, is printed, and the exit code is 1.
"""

import argparse
import contextlib
import copy
import inspect
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from dilabench.compat.transformers import interface, register

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "models.md"
NAME = "dilabench-matrix"
ROWS, LENGTH, NEW_TOKENS, WINDOW = 2, 16, 3, 6
MOST_PARAMETERS = 20_000_000
SECONDS_OF_A_CELL = 120
IS_NAN = "eager: NaN"

TABLES = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}

# The fields of configurations that set sizes, by the number that they get at most.
_FIELDS = {
    64: "vocab_size text_vocab_size n_vocab decoder_vocab_size vocab_size_per_layer_input",
    32: """hidden_size d_model n_embd dim embedding_size embed_dim n_embed model_dim emb_dim encoder_hidden_size
        lru_width decoder_hidden_size word_embed_proj_dim""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff dim_feedforward ffn_hidden_size
        hidden_dim shared_expert_intermediate_size""",
    16: "moe_intermediate_size q_lora_rank kv_lora_rank index_head_dim mamba_d_state ssm_state_size index_block_size",
    8: "head_dim attention_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim kv_channels d_kv global_head_dim",
    4: """num_attention_heads n_head encoder_attention_heads decoder_attention_heads num_heads n_heads n_routed_experts
        num_local_experts num_experts moe_num_experts index_topk decoder_num_attention_heads""",
    2: """num_key_value_heads num_kv_heads n_kv_heads index_n_heads num_experts_per_tok num_experts_per_token top_k
        moe_k mamba_n_groups first_k_dense_replace decoder_layers num_decoder_layers""",
    1: "n_group topk_group n_shared_experts num_shared_experts",
    128: "max_position_embeddings n_positions max_sequence_length max_target_positions max_source_positions n_ctx",
    WINDOW: "sliding_window local_attention attention_window window_size",
}
SIZES = {name: size for size, names in _FIELDS.items() for name in names.split()}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "n_layers")
# Families need one of these besides: a default that depends on a size, or heads that keys do not share.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": 8},
    {"head_dim": 8, "num_key_value_heads": 4},
    {"mamba_n_heads": 8, "mamba_d_head": 8},
    {"head_dim": 16, "num_key_value_heads": 4},
    {"hidden_size_per_layer_input": 0},
    {"pad_token_id": 0, "head_dim": 8},
)


class Family(NamedTuple):
    """A model type of transformers and a class of it. kind: a key of `TABLES`."""

    kind: str
    model_type: str
    class_name: str


class Cell(NamedTuple):
    """outcome: 'equal', 'refused', 'n/a', 'differs' or 'error'. note: by what, or why."""

    outcome: str
    note: str = ""


def families() -> list[Family]:
    """Every causal model, encoder and encoder-decoder of the installed transformers, by name."""
    found = []
    for kind, table in TABLES.items():
        for model_type, names in table.items():
            found.append(Family(kind, model_type, names if isinstance(names, str) else names[0]))
    return sorted(found)


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a configuration that make it small: few layers, one of each type, few channels, no dropout."""
    given = config.to_dict()
    layers = next((given[name] for name in LAYERS if isinstance(given.get(name), int)), 0)
    kept = _kept_layers(given, layers)
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, list) and len(value) == layers > 2:
            fields[name] = [value[layer] for layer in kept]
        elif isinstance(value, bool):
            continue
        elif name in LAYERS and isinstance(value, int):
            fields[name] = len(kept)
        elif name in SIZES and isinstance(value, int):
            fields[name] = min(value, SIZES[name])
        elif isinstance(value, float) and "drop" in name:
            fields[name] = 0.0
        elif name.endswith("_token_id") and isinstance(value, int):
            fields[name] = {"pad_token_id": 0, "bos_token_id": 1}.get(name, min(value, 60))
    if "eos_token_id" in given:
        fields["eos_token_id"] = None
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            fields[name] = {**fields_of(part), "model_type": part.model_type}
    return fields


def _kept_layers(given: dict[str, Any], layers: int) -> list[int]:
    """The first layer of each type, up to four, and two at least."""
    types = next(
        (
            x
            for x in given.values()
            if isinstance(x, list) and len(x) == layers > 2 and all(isinstance(t, str) for t in x)
        ),
        [],
    )
    kept = sorted({value: layer for layer, value in reversed([*enumerate(types)])}.values())[:4]
    return sorted({*kept, *[layer for layer in range(max(layers, 2)) if layer not in kept][: max(0, 2 - len(kept))]})


def model_of(family: Family) -> nn.Module:
    """The model with random weights, whose forward pass runs. Raises the first of the errors of `ATTEMPTS`."""
    kind = CONFIG_MAPPING[family.model_type]
    first: Exception | None = None
    for attempt in ATTEMPTS:
        try:
            fields = fields_of(kind()) | attempt
            config = kind(**fields)
            with torch.device("meta"):
                size = sum(
                    x.numel() for x in getattr(transformers, family.class_name)(copy.deepcopy(config)).parameters()
                )
            if size > MOST_PARAMETERS:
                raise ValueError(f"{size} parameters are more than {MOST_PARAMETERS}")
            torch.manual_seed(0)
            model: nn.Module = getattr(transformers, family.class_name)(config).float().eval()
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    # Of zeros and of ones, as some begin, attention would say nothing.
                    generator = torch.Generator().manual_seed(number)
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
                if model._can_set_attn_implementation():
                    model.set_attn_implementation("eager")
                plain(model, family)
            return model
        except Exception as error:  # noqa: BLE001 - of a third party's constructor
            first = first or error
    assert first is not None, "there are attempts"
    raise first


_numbers = torch.Generator().manual_seed(1)
IDS = torch.randint(2, 60, (ROWS, LENGTH), generator=_numbers)
PADDED = {side: torch.ones(ROWS, LENGTH, dtype=torch.long) for side in ("left", "right")}
PADDED["left"][0, :5] = PADDED["right"][0, LENGTH - 5 :] = 0
RESTARTING = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).expand(ROWS, -1)


def _inputs(model: nn.Module, **given: Any) -> dict[str, Any]:
    is_pair = "decoder_input_ids" in inspect.signature(model.forward).parameters
    decoder = {"decoder_input_ids": IDS.flip(1)} if is_pair else {}
    return {"input_ids": IDS, **decoder, **given}


def _forward(model: nn.Module, _family: Family, **given: Any) -> Tensor:
    out = model(**_inputs(model, **given))
    logits = out.logits if "logits" in out else out[0]
    rows = given.get("attention_mask")
    return logits if rows is None or "decoder_input_ids" in _inputs(model) else logits[rows.bool()]


def _without_cache(model: nn.Module) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def plain(model: nn.Module, family: Family) -> Tensor:
    """Logits of a batch without a mask."""
    return _forward(model, family, **_without_cache(model))


def padded_left(model: nn.Module, family: Family) -> Tensor:
    """Logits of the tokens that are no padding; of encoder-decoders, whose source is padded, all."""
    return _forward(model, family, attention_mask=PADDED["left"], **_without_cache(model))


def padded_right(model: nn.Module, family: Family) -> Tensor:
    """As `padded_left`."""
    return _forward(model, family, attention_mask=PADDED["right"], **_without_cache(model))


def packed(model: nn.Module, family: Family) -> Tensor | None:
    """Logits of documents by restarting position_ids."""
    if family.kind != "causal" or "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    return _forward(model, family, position_ids=RESTARTING, **_without_cache(model))


def _generated(model: nn.Module, family: Family, **given: Any) -> Tensor | None:
    if family.kind == "encoder" or not model.can_generate():
        return None
    decoder = {} if family.kind == "causal" else {"decoder_start_token_id": 1}
    out = model.generate(
        IDS,
        attention_mask=PADDED["left"],
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **decoder,
        **given,
    )
    return torch.stack(out.logits)


def dynamic_cache(model: nn.Module, family: Family) -> Tensor | None:
    """Logits of tokens that are generated after a left-padded batch."""
    return _generated(model, family)


def static_cache(model: nn.Module, family: Family) -> Tensor | None:
    """As `dynamic_cache`, with a cache of fixed length."""
    return _generated(model, family, cache_implementation="static")


def compiled(model: nn.Module, family: Family) -> Tensor:
    """As `plain`, with the attention of dilabench under torch.compile."""
    if model.config._attn_implementation != NAME:
        return plain(model, family)
    torch._dynamo.reset()
    call = torch.compile(model.forward, backend="eager")
    out = call(**_inputs(model, **_without_cache(model)))
    return out.logits if "logits" in out else out[0]


@contextlib.contextmanager
def _checkpointing_known() -> Iterator[None]:
    """In it a model without checkpoints is left as it is, and no version warns of the method's name."""
    with warnings.catch_warnings(), contextlib.suppress(ValueError, AttributeError):
        warnings.simplefilter("ignore", FutureWarning)
        yield


def gradients(model: nn.Module, family: Family) -> Tensor:
    """Gradients of all parameters, with checkpoints where the model has them."""
    with _checkpointing_known():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    try:
        model.zero_grad()
        with torch.enable_grad():
            logits = _forward(model, family, attention_mask=PADDED["right"], **_without_cache(model))
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
            (logits * weights).sum().backward()
        return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
    finally:
        model.eval()
        with _checkpointing_known():
            model.gradient_checkpointing_disable()


FORMS: dict[str, Callable[[nn.Module, Family], Tensor | None]] = {
    "plain": plain,
    "padded left": padded_left,
    "padded right": padded_right,
    "packed": packed,
    "generate": dynamic_cache,
    "static cache": static_cache,
    "compiled": compiled,
    "gradients": gradients,
}


class _Late(BaseException):
    pass


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class _Counted:
    """The attention that is registered, with the number of calls that reach it, and that torch computes."""

    def __init__(self) -> None:
        self.calls, self.by_torch = 0, 0
        self.attend = interface.ALL_ATTENTION_FUNCTIONS[NAME]
        interface.ALL_ATTENTION_FUNCTIONS.register(NAME, self)
        interface._fall_back = self._fall_back  # type: ignore[assignment]

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        self.calls += 1
        return self.attend(*tensors, **options)

    def _fall_back(self, _module: nn.Module, _reason: str) -> None:
        self.by_torch += 1


def _is_refusal(error: BaseException) -> bool:
    """Whether dilabench raised a ValueError of its own."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and "dilabench" in frames[-1].filename


def row_of(family: Family, forms: tuple[str, ...] = tuple(FORMS)) -> dict[str, Cell] | str:
    """The cells of a family by form, or why it has none."""
    register(NAME)
    counted = _Counted()
    try:
        with _limited(SECONDS_OF_A_CELL):
            model = model_of(family)
            model = _in_float64(model, family)
    except _Late:
        return "builds too slowly"
    except Exception as error:  # noqa: BLE001 - of a third party's constructor
        return f"not built: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    if not model._can_set_attn_implementation():
        return "its attention has no interface"
    cells = {}
    for form in forms:
        cell = _cell(model, family, FORMS[form], counted)
        if cell.note == IS_NAN and model.dtype == torch.float64:
            # Scores of float64 overflow where eager attention adds the least number to them.
            cell = _cell(model.float(), family, FORMS[form], counted)
            model.double()
        cells[form] = cell
    return cells


def _in_float64(model: nn.Module, family: Family) -> nn.Module:
    try:
        with torch.no_grad():
            plain(model.double(), family)
    except (RuntimeError, TypeError):
        model = model.float()
    return model


def _cell(model: nn.Module, family: Family, form: Callable[..., Tensor | None], counted: _Counted) -> Cell:
    results: list[Tensor] = []
    for name in ("eager", NAME):
        counted.calls = counted.by_torch = 0
        try:
            with torch.no_grad(), _limited(SECONDS_OF_A_CELL), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.set_attn_implementation(name)
                # Some models draw numbers when they train.
                torch.manual_seed(3)
                result = form(model, family)
        except _Late:
            return Cell("n/a" if name == "eager" else "error", "takes too long")
        except Exception as error:  # noqa: BLE001 - of a third party's model
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if name == "eager":
                return Cell("n/a", f"eager: {what}")
            return Cell("refused" if _is_refusal(error) else "error", what)
        if result is None:
            return Cell("n/a")
        results.append(result)
    expected, found = results
    if expected.isnan().any():
        return Cell("n/a", IS_NAN)
    if not counted.calls and form is not compiled:
        return Cell("n/a", "no call of attention")
    if expected.shape != found.shape:
        return Cell("differs", f"{tuple(found.shape)}, not {tuple(expected.shape)}")
    # Some layers of models compute in float32 whatever their dtype.
    tolerance = 2e-4 if expected.dtype == torch.float64 else 2e-3
    off = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    if not off <= tolerance:
        return Cell("differs", f"{off:.1e} relative")
    return Cell("equal", "torch" if counted.by_torch else "")


def _row(family: Family, forms: tuple[str, ...]) -> tuple[Family, dict[str, Cell] | str, float]:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    started = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):
        row = row_of(family, forms)
    return family, row, time.monotonic() - started


def main() -> int:
    """Run the matrix. Return 1 if a cell differs or raises another error than a refusal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; by default all, which writes the page")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--print", action="store_true", help="print the rows instead of writing the page")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=[*FORMS], help="cells; all by default")
    parser.add_argument("--rows", type=Path, help="a file of rows, which are not computed again; new ones are added")
    options = parser.parse_args()
    asked = [family for family in families() if not options.families or family.model_type in options.families]
    rows = _read(options.rows) if options.rows else {}
    asked = [
        family for family in asked if not (isinstance(rows.get(family, {}), str) or _has(rows, family, options.forms))
    ]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=8) as pool:
        for family, row, seconds in pool.imap_unordered(partial(_row, forms=tuple(options.forms)), asked):
            _merge(rows, family, row)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps([family, row]) + "\n")
            print(f"{family.kind} {family.model_type} ({seconds:.0f} s): {_in_words(row)}", flush=True)
    wrong = [
        f"{family.kind} {family.model_type} {form}: {cell.outcome} {cell.note}"
        for family, row in sorted(rows.items())
        if not isinstance(row, str)
        for form, cell in row.items()
        if cell.outcome in ("differs", "error")
    ]
    if not (options.print or options.families):
        PAGE.write_text(page(rows))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    print("\n".join([f"{len(wrong)} cells are wrong", *wrong]))
    return bool(wrong)


def _in_words(row: dict[str, Cell] | str) -> str:
    if isinstance(row, str):
        return row
    return ", ".join(
        " ".join([form, cell.outcome, f"({cell.note[:160]})" if cell.note else ""]).strip()
        for form, cell in row.items()
    )


Rows = dict[Family, dict[str, Cell] | str]


def _read(path: Path) -> Rows:
    rows: Rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        family, row = json.loads(line)
        _merge(
            rows, Family(*family), row if isinstance(row, str) else {form: Cell(*cell) for form, cell in row.items()}
        )
    return rows


def _merge(rows: Rows, family: Family, row: dict[str, Cell] | str) -> None:
    before = rows.get(family)
    rows[family] = {**before, **row} if isinstance(before, dict) and isinstance(row, dict) else row


def _has(rows: Rows, family: Family, forms: list[str]) -> bool:
    row = rows.get(family)
    return isinstance(row, dict) and row.keys() >= {*forms}


def page(rows: Rows) -> str:
    """docs/reference/models.md of these rows."""
    compared = {family: row for family, row in sorted(rows.items()) if not isinstance(row, str) and _attends(row)}
    cells = [cell for row in compared.values() for cell in row.values()]
    counts = {
        outcome: sum(cell.outcome == outcome for cell in cells) for outcome in ("equal", "refused", "differs", "error")
    }
    by_torch = sum(cell.note == "torch" for cell in cells)
    lines = [
        "# Models of transformers",
        "",
        "This page is written by `python scripts/model_matrix.py`, which builds every causal model, encoder and",
        f"encoder-decoder of the installed transformers (here {transformers.__version__}) with random weights and few",
        "channels, and compares dilabench with eager attention on a CPU, in float64 where eager attention runs in it.",
        "[Use attention in models of transformers](../how-to/use-in-transformers.md) shows how to register it.",
        "",
        f"{len(compared)} model classes, {len(cells)} cells: {counts['equal']} equal, of which torch's",
        f"`scaled_dot_product_attention` computes {by_torch} in full or in part, {counts['refused']} refused by name,",
        f"{counts['differs'] + counts['error']} that differ or fail. The others do not apply: eager attention does not",
        "run, or the model has no such form.",
        "",
        "| cell | meaning |",
        "| --- | --- |",
        "| = | equal, every call computed by dilabench |",
        "| = torch | equal, some or all calls computed by torch, with a warning that gives the reason |",
        "| refused | `ValueError` with the name of what is not computed |",
        "| — | does not apply |",
        "",
        "Forms: **plain** is a batch without a mask, **padded** one with `attention_mask`, **packed** has",
        "`position_ids` that restart, **generate** and **static cache** generate after a left-padded batch,",
        "**compiled** is plain under `torch.compile` with `use_cache=False`, **gradients** are those of all parameters",
        "with gradient checkpointing.",
    ]
    for kind in TABLES:
        lines += ["", f"## {kind.capitalize()} models", "", f"| model type | {' | '.join(FORMS)} |"]
        lines.append("| --- |" + " --- |" * len(FORMS))
        for family, row in compared.items():
            if family.kind == kind:
                shown = (_shown(row[form]) if form in row else "not run" for form in FORMS)
                lines.append(f"| {family.model_type} | {' | '.join(shown)} |")
    reasons: dict[str, set[str]] = {}
    for family, row in compared.items():
        for cell in row.values():
            if cell.outcome in ("refused", "differs", "error"):
                reasons.setdefault(cell.note.replace("|", "/"), set()).add(family.model_type)
    if reasons:
        lines += ["", "## Refused", "", "| message | model types |", "| --- | --- |"]
        lines += [f"| {reason} | {', '.join(sorted(types))} |" for reason, types in sorted(reasons.items())]
    lines += ["", "## Not compared", "", "| model type | reason |", "| --- | --- |"]
    for family in families():
        if family not in compared:
            row = rows.get(family, "was not run")
            reason = row if isinstance(row, str) else "no call of attention reaches the interface, or eager fails"
            lines.append(f"| {family.model_type} ({family.kind}) | {reason.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _attends(row: dict[str, Cell]) -> bool:
    return any(cell.outcome != "n/a" for form, cell in row.items() if form != "compiled")


def _shown(cell: Cell) -> str:
    return {"equal": "= torch" if cell.note else "=", "n/a": "—"}.get(cell.outcome, cell.outcome)


if __name__ == "__main__":
    sys.exit(main())
