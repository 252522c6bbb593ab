"""SPACE ≡ plain, bitwise, in every cell of the matrix, and in each drafts are refused, taken in part, taken whole."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from itertools import product

import pytest
import torch
from doubles.gguf_files import write_gguf
from exactness_matrix import (
    AXES,
    FAMILIES,
    LAYOUTS,
    PROCESSORS,
    TEMPERATURES,
    Cell,
    Subject,
    cell_name,
    check_cell,
    cover,
)
from quantized_testing import write_mxfp4_experts, write_quantized
from space_model.loading.load import load_model
from tiny_checkpoints import tiny_adapter, tiny_checkpoint

Subjects = Callable[..., Subject]

FEW_SAMPLING_PARAMS = {"temperature": (0.0, 0.8), "processor": ("none", "repetition", "top_p"), "context": ("short",)}
"""For the embedded model, whose steps are not tiny."""


def conditions() -> list[tuple[str, Cell]]:
    """Every combination of the other conditions; the laws, contexts and stale slots take turns."""
    turns = ("temperature", "processor", "context", "stale")
    axes = {name: values for name, values in AXES.items() if name not in turns}
    batch_params = list(product(TEMPERATURES, PROCESSORS))
    cells = []
    for number, (model, *values) in enumerate(product(FAMILIES, *axes.values())):
        temperature, processor = batch_params[number * 7 % len(batch_params)]
        case = dict(zip(axes, values, strict=True))
        context, stale = AXES["context"][number // 2 % 2], AXES["stale"][number // 4 % 2]
        sampling_params = {"temperature": temperature, "processor": processor}
        cells.append((model, Cell(**case, **sampling_params, context=context, stale=stale)))
    return cells


@pytest.mark.parametrize(("model", "cell"), cover(2), ids=cell_name)
def test_space_is_plain_bit_by_bit(model: str, cell: Cell, subject_of: Subjects) -> None:
    subject = subject_of(model, cell.dtype)
    assert cell.dtype == "float32" or subject.model.facts.attention == "compiled"
    check_cell(subject, cell)


@pytest.mark.parametrize(("model", "cell"), cover(1, model=("qwen2_vl",)), ids=cell_name)
def test_space_is_plain_bit_by_bit_with_the_text_part_of_a_model_that_sees(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


FORCED = {"model": ("llama", "gemma2"), "layout": ("forced",), "company": ("batch",)}


@pytest.mark.parametrize(("model", "cell"), cover(2, **FORCED, **FEW_SAMPLING_PARAMS), ids=cell_name)
def test_space_is_plain_bit_by_bit_with_drafts_that_requests_command(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.parametrize(("model", "cell"), cover(2, model=("embedded",), **FEW_SAMPLING_PARAMS), ids=cell_name)
def test_space_is_plain_bit_by_bit_with_the_embedded_model(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.parametrize(
    ("model", "cell"), cover(2, model=("llama",), dtype=("bfloat16",), **FEW_SAMPLING_PARAMS), ids=cell_name
)
@pytest.mark.parametrize("attention", [pytest.param("auto", marks=pytest.mark.slow), "torch"])  # cells above have auto
def test_it_is_so_with_compiled_operations_and_without(
    model: str, cell: Cell, attention: str, subject_of: Subjects
) -> None:
    subject = subject_of(model, cell.dtype, attention)
    assert subject.model.facts.attention == ("compiled" if attention == "auto" else "torch")
    check_cell(subject, cell)


@pytest.mark.parametrize(
    ("model", "cell"), cover(1, model=("llama",), dtype=("bfloat16",), **FEW_SAMPLING_PARAMS), ids=cell_name
)
@pytest.mark.parametrize(
    ("weights", "attention"),
    [
        ("int8", "auto"),
        pytest.param("int8", "torch", marks=pytest.mark.slow),
        ("fp8", "auto"),
        ("int4", "auto"),
        ("int4", "torch"),
    ],
)
def test_it_is_so_with_weights_of_eight_bits(
    model: str, cell: Cell, weights: str, attention: str, subject_of: Subjects
) -> None:
    subject = subject_of(model, cell.dtype, attention, weights=weights)
    assert subject.model.facts.weights == weights
    check_cell(subject, cell)


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Subject]:
    """A type of GGUF blocks -> a model that keeps them, with a gated adapter and its draft head."""
    subjects: dict[tuple[str, str], Subject] = {}

    def find(kind: str, family: str = "llama") -> Subject:
        if (kind, family) not in subjects:
            folder = tmp_path_factory.mktemp(kind)
            sizes = {"hidden_size": 32, "num_heads": 2, "kv_heads": 1, "num_masks": 0}
            source = tiny_checkpoint(folder / "source", family, seed=1, tie_word_embeddings=False, **sizes)
            own = tiny_adapter(folder / "own", source)
            section = json.loads((own / "config.json").read_text())
            del section["space"]["base"]
            (own / "config.json").write_text(json.dumps(section))
            bare = write_gguf(source, folder / "bare.gguf", kind)
            shutil.copy(bare, own / "x.gguf")
            model, base = (load_model(path, weights="gguf") for path in (own, bare))
            assert base.facts.number_format == "bfloat16 with gguf weights"
            subjects[kind, family] = Subject("own-llama", model, adapters=("",) * 4, base=base)
        return subjects[kind, family]

    return find


@pytest.mark.parametrize(
    ("model", "cell"),
    cover(1, model=("llama",), dtype=("bfloat16",), layout=("k5", "mixed"), **FEW_SAMPLING_PARAMS),
    ids=cell_name,
)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_it_is_so_with_the_blocks_of_a_gguf(
    model: str, cell: Cell, kind: str, in_blocks: Callable[[str], Subject]
) -> None:
    check_cell(in_blocks(kind), cell)


@pytest.fixture(scope="module")
def as_packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Subject]:
    """A kind of quantised checkpoint -> a model that keeps its four bits, with a gated adapter and its draft head."""
    subjects: dict[tuple[str, str], Subject] = {}

    def find(kind: str, family: str = "llama") -> Subject:
        if (kind, family) not in subjects:
            folder = tmp_path_factory.mktemp("packed")
            sizes = {"hidden_size": 32, "num_heads": 2, "kv_heads": 1, "num_masks": 0}
            source = tiny_checkpoint(folder / "source", family, seed=1, tie_word_embeddings=False, **sizes)
            if kind == "MXFP4":
                write_mxfp4_experts(source, folder / "bare", folder / "plain")
            else:
                write_quantized(source, folder / "bare", folder / "plain", kind)
            own = tiny_adapter(folder / "own", folder / "bare")
            model, base = (load_model(path, weights="auto") for path in (own, folder / "bare"))
            assert model.facts.number_format == base.facts.number_format == "bfloat16 with packed weights"
            subjects[kind, family] = Subject("own-llama", model, adapters=("",) * 4, base=base)
        return subjects[kind, family]

    return find


@pytest.mark.parametrize(
    ("model", "cell"),
    cover(1, model=("llama",), dtype=("bfloat16",), layout=("k5", "mixed"), **FEW_SAMPLING_PARAMS),
    ids=cell_name,
)
@pytest.mark.parametrize("kind", ["awq", "gptq 4 bits, one order for all linears", "int4 in groups"])
def test_it_is_so_with_the_four_bits_of_a_quantised_checkpoint(
    model: str, cell: Cell, kind: str, as_packed: Callable[[str], Subject]
) -> None:
    check_cell(as_packed(kind), cell)


@pytest.mark.parametrize(("model", "cell"), cover(1, model=("llama",), **FEW_SAMPLING_PARAMS), ids=cell_name)
@pytest.mark.parametrize("weights", ["plain", "fp8"])
def test_it_is_so_with_keys_and_values_of_eight_bits(
    model: str, cell: Cell, weights: str, subject_of: Subjects
) -> None:
    dtype = cell.dtype if weights == "plain" else "bfloat16"
    subject = subject_of(model, dtype, weights=weights, kv_dtype="fp8")
    assert subject.model.facts.kv_dtype is torch.float8_e4m3fn
    check_cell(subject, cell)


@pytest.mark.parametrize(
    ("model", "cell"),
    cover(1, model=("falcon", "bloom", "phi3_longrope"), layout=("k5", "mixed"), **FEW_SAMPLING_PARAMS),
    ids=cell_name,
)
def test_it_is_so_with_families_that_attend_by_themselves_or_turn_by_length(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


LATENT: dict[str, tuple[object, ...]] = {
    "model": ("deepseek_v2", "deepseek_v3", "mimo_v2_flash"), "layout": ("k5", "mixed"),
    "processor": ("none", "repetition"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "cell"), cover(2, **LATENT, temperature=(0.0, 0.8)), ids=cell_name)
def test_it_is_so_with_latent_attention(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.parametrize(("model", "cell"), cover(1, **LATENT, temperature=(0.0, 0.8)), ids=cell_name)
@pytest.mark.parametrize(("kv_dtype", "weights"), [("fp8", "plain"), ("auto", "int4")])
def test_it_is_so_with_latent_attention_in_other_formats(
    model: str, cell: Cell, kv_dtype: str, weights: str, subject_of: Subjects
) -> None:
    dtype = cell.dtype if weights == "plain" else "bfloat16"
    check_cell(subject_of(model, dtype, weights=weights, kv_dtype=kv_dtype), cell)


ROUTED: dict[str, tuple[object, ...]] = {"model": ("glm4_moe",), "layout": ("k5", "mixed"), **FEW_SAMPLING_PARAMS}


@pytest.mark.parametrize(("model", "cell"), cover(1, **ROUTED), ids=cell_name)
@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_it_is_so_with_experts_chosen_by_sigmoids_and_a_shared_one(
    model: str, cell: Cell, weights: str, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype if weights == "plain" else "bfloat16", weights=weights), cell)


@pytest.mark.parametrize(("model", "cell"), cover(1, **(ROUTED | {"model": ("gpt_oss",)})), ids=cell_name)
def test_it_is_so_with_attention_sinks(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.parametrize(("model", "cell"), cover(1, **(ROUTED | {"model": ("llama4",)})), ids=cell_name)
def test_it_is_so_with_chunks_of_positions_and_experts_of_scaled_rows(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


UNEQUAL_LAYERS: dict[str, tuple[object, ...]] = {"model": ("gemma4", "gemma4_moe"), "layout": ("k5", "mixed")}


@pytest.mark.parametrize(("model", "cell"), cover(1, **UNEQUAL_LAYERS, **FEW_SAMPLING_PARAMS), ids=cell_name)
def test_it_is_so_with_layers_that_differ_in_heads_or_share_keys(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


POSITIONS: dict[str, tuple[object, ...]] = {"model": ("xglm", "alibi_llama"), "layout": ("k5", "mixed")}


@pytest.mark.parametrize(("model", "cell"), cover(1, **POSITIONS, **FEW_SAMPLING_PARAMS), ids=cell_name)
def test_it_is_so_with_positions_that_are_added_to_embeddings_or_to_scores(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


VERSIONS: dict[str, tuple[object, ...]] = {"model": ("gemma3n",), "layout": ("k5", "mixed")}


@pytest.mark.parametrize(("model", "cell"), cover(1, **VERSIONS, **FEW_SAMPLING_PARAMS), ids=cell_name)
def test_it_is_so_with_several_versions_of_every_row(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cell"), cover(2, model=("gemma3n",), **FEW_SAMPLING_PARAMS), ids=cell_name)
def test_every_two_conditions_with_several_versions_of_every_row(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cell"), cover(2, model=("gemma4", "gemma4_moe"), **FEW_SAMPLING_PARAMS), ids=cell_name
)
def test_every_two_conditions_with_layers_that_differ_in_heads_or_share_keys(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cell"),
    cover(2, model=("llama", "gemma2", "embedded"), dtype=("bfloat16",), **FEW_SAMPLING_PARAMS),
    ids=cell_name,
)
@pytest.mark.parametrize(
    "held", [{"weights": "int8"}, {"weights": "fp8"}, {"weights": "fp8", "kv_dtype": "fp8"}, {"weights": "int4"}]
)
def test_every_two_conditions_with_eight_bits(
    model: str, cell: Cell, held: dict[str, str], subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype, **held), cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cell"), cover(2, model=("falcon", "bloom", "phi3_longrope"), **FEW_SAMPLING_PARAMS), ids=cell_name
)
def test_every_two_conditions_with_families_that_attend_by_themselves_or_turn_by_length(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "cell"), cover(3), ids=cell_name)
def test_every_three_conditions_together(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", FAMILIES)
def test_all_conditions_together(model: str, layout: str, dtype: str, subject_of: Subjects) -> None:
    for named, cell in conditions():
        if (named, cell.layout, cell.dtype) == (model, layout, dtype):
            check_cell(subject_of(model, dtype), cell)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("life", AXES["life"])
@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [*FAMILIES, "embedded"])
def test_the_whole_product(
    model: str, layout: str, dtype: str, life: str, subject_of: Subjects, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--whole-matrix", default=False):
        pytest.skip("every cell of the product takes days: pytest tests/exactness -m slow --whole-matrix")
    subject = subject_of(model, dtype)
    fixed = {"layout": (layout,), "dtype": (dtype,), "life": (life,)}
    axes = {**AXES, **fixed}
    for values in product(*(axes[field.name] for field in fields(Cell))):
        check_cell(subject, Cell(*values))


EXPERTS = cover(1, model=("experts",), dtype=("bfloat16",), layout=("k5", "mixed"), **FEW_SAMPLING_PARAMS)


@pytest.mark.parametrize(("model", "cell"), EXPERTS[:2], ids=cell_name)
def test_it_is_so_with_experts_in_the_blocks_of_a_gguf(
    model: str, cell: Cell, in_blocks: Callable[..., Subject]
) -> None:
    check_cell(in_blocks("Q4_0", "qwen3_moe"), cell)


@pytest.mark.parametrize(("model", "cell"), EXPERTS[:2], ids=cell_name)
def test_it_is_so_with_experts_in_the_four_bits_of_a_quantised_checkpoint(
    model: str, cell: Cell, as_packed: Callable[..., Subject]
) -> None:
    check_cell(as_packed("awq", "qwen3_moe"), cell)


@pytest.mark.parametrize(("model", "cell"), EXPERTS[:2], ids=cell_name)
def test_it_is_so_with_experts_in_mxfp4(model: str, cell: Cell, as_packed: Callable[..., Subject]) -> None:
    check_cell(as_packed("MXFP4", "gpt_oss"), cell)


@pytest.mark.parametrize(("model", "cell"), EXPERTS[:2], ids=cell_name)
def test_it_is_so_with_gpt_oss_in_the_blocks_of_a_gguf(
    model: str, cell: Cell, in_blocks: Callable[..., Subject]
) -> None:
    check_cell(in_blocks("MXFP4", "gpt_oss"), cell)


@pytest.mark.parametrize(("model", "cell"), EXPERTS[:2], ids=cell_name)
@pytest.mark.parametrize("kind", ["int8 in groups", "int8 per row"])
def test_it_is_so_with_experts_in_the_eight_bits_of_a_quantised_checkpoint(
    model: str, cell: Cell, kind: str, as_packed: Callable[..., Subject]
) -> None:
    check_cell(as_packed(kind, "qwen3_moe"), cell)
