"""Plans: what is ranked, what is refused and why, and where each rank sits."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from stoker.cli.views.training import train
from stoker.exceptions import BadRequestError
from stoker_train.planning import ClusterShape, Link, ModelShape, plan_training
from stoker_train.planning.adapters import shape_of
from stoker_train.planning.hardware.cluster_records import cluster_of
from stoker_train.planning.hardware.gpu_kinds import kind_of
from stoker_train.planning.model_shape import transformer
from stoker_wire.messages.cluster import NodeState

H100 = ClusterShape(2, 8, 80e9, 0.7 * 989e12, host_bytes=1e12)


def gpt(layers: int = 24, hidden: int = 2048, heads: int = 16, **changes: Any) -> ModelShape:
    return transformer(
        "gpt", layers=layers, hidden=hidden, heads=heads, vocab=50304, tied=False, **changes
    )


def test_every_plan_fits_and_is_the_sum_of_its_parts() -> None:
    found = plan_training(gpt(), cluster=H100, batch=64, seq_len=2048, limit=500)
    assert found.plans and found.considered >= len(found.plans)
    times = [plan.time.total_s for plan in found.plans]
    assert times == sorted(times)
    for plan in found.plans:
        degrees, time = plan.strategy, plan.time
        assert degrees.gpus == 16
        assert degrees.batch == 64
        assert plan.memory.total <= H100.usable_bytes
        assert 0 < plan.efficiency <= 1
        assert [first for first, _ in plan.stages] == [0, *(end for _, end in plan.stages[:-1])]
        assert plan.stages[-1][1] == 24
        p, m, v = degrees.pipeline, degrees.micro_batches, degrees.interleave
        assert len(plan.stages) == p * v
        busy = time.compute_s + time.tensor_s + time.expert_s + time.pipeline_s
        assert time.bubble_s == pytest.approx(busy * (p - 1) / (m * v)), "Narayanan et al. 2021"
        assert not (degrees.zero > 1 and p > 1)


def test_tensor_groups_never_straddle_nodes_when_they_fit_in_one() -> None:
    for nodes, per_node in ((2, 8), (4, 6), (3, 4)):
        cluster = ClusterShape(nodes, per_node, 80e9, 7e14)
        shape = gpt(hidden=48 * 64, heads=48)
        found = plan_training(shape, cluster=cluster, batch=48, seq_len=1024, limit=1000)
        for plan in found.plans:
            degrees = plan.strategy
            ranks = set()
            for data in range(degrees.data):
                for stage in range(degrees.pipeline):
                    group = [plan.rank_of(data, one, stage) for one in range(degrees.tensor)]
                    ranks |= set(group)
                    if degrees.tensor <= per_node:
                        assert len({rank // per_node for rank in group}) == 1, degrees
            assert ranks == set(range(degrees.gpus))
        straddles = [one for one in found.refusals if one.constraint == "nodes"]
        assert (per_node == 8) == (not straddles or "multiple" in straddles[0].nearest)


def test_what_does_not_fit_names_the_constraint_that_binds() -> None:
    small = ClusterShape(1, 3, 8e9, 7e14, reserved_bytes=1e9)
    found = plan_training(gpt(layers=2), cluster=small, batch=4, seq_len=2048)
    refused = {one.constraint: one for one in found.refusals}
    assert refused["batch"].nearest == "batch 4 is not a multiple of data 3"
    assert refused["heads"].nearest == "heads 16 is not a multiple of tensor 3"
    assert refused["layers"].nearest == "pipeline 3 of 2 layers"
    assert not found.plans
    with pytest.raises(ValueError, match="no plan fits"):
        _ = found.best
    tight = ClusterShape(1, 2, 8e9, 7e14, reserved_bytes=1e9)
    found = plan_training(gpt(), cluster=tight, batch=4, seq_len=2048)
    assert not found.plans
    [memory] = [one for one in found.refusals if one.constraint == "GPU memory"]
    assert "GB of 7.0 on a rank" in memory.nearest


def test_offload_makes_room_where_nothing_else_does() -> None:
    shape = gpt(layers=32, hidden=4096, heads=32)
    one = ClusterShape(1, 1, 80e9, 7e14)
    assert not plan_training(shape, cluster=one, batch=4, seq_len=1024).plans
    host = ClusterShape(1, 1, 80e9, 7e14, host_bytes=500e9)
    best = plan_training(shape, cluster=host, batch=4, seq_len=1024).best
    assert best.strategy.offload
    assert best.memory.optimizer == 0
    little = ClusterShape(1, 1, 80e9, 7e14, host_bytes=10e9)
    found = plan_training(shape, cluster=little, batch=4, seq_len=1024)
    assert "host memory" in {refusal.constraint for refusal in found.refusals}


def test_a_slow_network_keeps_gradients_in_a_node_and_a_fast_one_does_not_matter() -> None:
    slow = ClusterShape(2, 4, 80e9, 7e14, between=Link(1e8))
    best = plan_training(gpt(), cluster=slow, batch=64, seq_len=2048).best.strategy
    assert best.pipeline > 1
    assert best.data * best.data_stride <= 4, f"gradients cross the network: {best}"


def test_experts_are_spread_and_counted() -> None:
    shape = gpt(layers=8, hidden=1024, heads=16, experts=8, experts_per_token=2, gated=True)
    dense = gpt(layers=8, hidden=1024, heads=16, gated=True)
    assert shape.parameters > 3 * dense.parameters
    assert shape.flops_per_token(1024) < 3 * dense.flops_per_token(1024)
    found = plan_training(shape, cluster=H100, batch=64, seq_len=1024, limit=1000)
    assert {plan.strategy.expert for plan in found.plans} >= {1, 2, 4, 8}


def test_hundreds_of_gpus_are_planned() -> None:
    """See ``benchmarks/planning.py`` for how long more of them take."""
    cluster = ClusterShape(32, 8, 80e9, 7e14)
    shape = gpt(layers=48, hidden=12288, heads=96)
    best = plan_training(shape, cluster=cluster, batch=512, seq_len=2048).best
    assert best.strategy.tensor <= 8
    assert best.strategy.pipeline > 1
    assert json.loads(json.dumps(best.as_dict()))["strategy"]["zero"] == best.strategy.zero


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be a whole number from 1, got 0"),
        ({"seq_len": True}, "seq_len must be a whole number from 1, got True"),
        ({"gpus": 17}, "gpus=17, but the cluster has 16 equal GPUs"),
        ({"dtype": "int8"}, "dtype 'int8' is not known"),
        ({"profile": 0.0}, "profile must be seconds above 0"),
    ],
)
def test_bad_input_names_the_argument(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"cluster": H100, "batch": 64, "seq_len": 2048, **changes}
    with pytest.raises(ValueError, match=message):
        plan_training(gpt(), **arguments)


def test_other_bad_input() -> None:
    with pytest.raises(TypeError, match="model is a int"):
        plan_training(3, cluster=H100, batch=1, seq_len=1)
    with pytest.raises(ValueError, match="seq_len 300 is more than the model takes, 200"):
        plan_training(gpt(max_seq_len=200), cluster=H100, batch=16, seq_len=300)
    with pytest.raises(ValueError, match="bytes_per_s must be at least 1"):
        Link(0.0)
    with pytest.raises(ValueError, match="nodes must be a whole number from 1"):
        ClusterShape(0, 8, 80e9, 7e14)


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "rope_theta": 5e5,
}  # fmt: skip


CONFIGS = {
    # What transformers 5.24 makes of each, on the meta device.
    "llama": ({}, 8_030_261_248),
    "qwen2": ({"vocab_size": 151936, "tie_word_embeddings": True}, 7_602_000_000),
    "gemma": (
        {
            "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": 256, "intermediate_size": 24576,
            "vocab_size": 256000, "tie_word_embeddings": True,
        },
        8_537_680_896,
    ),
    "falcon": (
        {
            "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024,
            "num_key_value_heads": None, "intermediate_size": None, "tie_word_embeddings": True,
        },
        6_921_720_704,
    ),
    "gpt2": (
        {
            "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
            **dict.fromkeys((
                "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "intermediate_size", "max_position_embeddings", "rope_theta", "tie_word_embeddings",
            )),
        },
        124_439_808,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_a_config_of_hugging_face_counts_its_parameters(family: str) -> None:
    changes, expected = CONFIGS[family]
    values = {**LLAMA, **changes, "model_type": family}
    values = {name: value for name, value in values.items() if value is not None}
    shape = shape_of(SimpleNamespace(**values, to_dict=dict))
    assert shape.parameters == pytest.approx(expected, rel=0.01)
    assert shape.causal


def test_a_family_that_is_not_known_is_refused() -> None:
    t5 = SimpleNamespace(model_type="t5", to_dict=dict, is_encoder_decoder=True)
    with pytest.raises(TypeError, match="model is a t5"):
        plan_training(t5, cluster=H100, batch=16, seq_len=512)


def test_any_module_has_a_shape_and_is_not_cut_inside() -> None:
    torch = pytest.importorskip("torch", reason="needs torch (the `train` extra)")

    def block() -> Any:
        return torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
        )

    halves = [torch.nn.ModuleList([block() for _ in range(3)]) for _ in range(2)]
    model = torch.nn.ModuleDict({"in": torch.nn.Linear(8, 64), "a": halves[0], "b": halves[1]})
    shape = shape_of(model)
    assert len(shape.layers) == 6, "an encoder's, then a decoder's"
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    found = plan_training(shape, cluster=H100, batch=16, seq_len=1, limit=100)
    assert {plan.strategy.tensor for plan in found.plans} == {1}
    assert "tensor parallelism" in {one.constraint for one in found.refusals}

    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    assert plan_training(flat, cluster=H100, batch=16, seq_len=1, gpus=2).plans
    images = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))
    with pytest.raises(TypeError, match="Sequential has convolutions"):
        plan_training(images, cluster=H100, batch=16, seq_len=1)


def test_host_memory_is_of_the_gpus_that_are_used() -> None:
    shape = gpt(layers=32, hidden=4096, heads=32)
    cluster = ClusterShape(1, 8, 80e9, 7e14, host_bytes=200e9)
    assert plan_training(
        shape, cluster=cluster, batch=4, seq_len=1024, gpus=1
    ).best.strategy.offload


def test_a_cut_leaves_room_for_what_is_whole_for_a_moment() -> None:
    """Each plan fits; and one that only an uneven cut makes fit is found."""
    shape = gpt(layers=32, hidden=4096, heads=32)
    sizes = {}
    for gigabytes in (26, 28, 30, 32, 34):
        tight = ClusterShape(1, 8, gigabytes * 1e9, 7e14, reserved_bytes=0.0)
        found = plan_training(shape, cluster=tight, batch=64, seq_len=4096, limit=1000)
        assert all(plan.memory.total <= tight.usable_bytes for plan in found.plans)
        sizes[gigabytes] = len(found.plans)
    assert list(sizes.values()) == sorted(sizes.values()), f"more memory, fewer plans: {sizes}"


def test_groups_that_straddle_nodes_have_the_network() -> None:
    cluster = ClusterShape(3, 8, 80e9, 7e14)
    assert cluster.link_of(4, 2) == cluster.inside
    assert cluster.link_of(3, 2).bytes_per_s < cluster.inside.bytes_per_s
    assert cluster.link_of(2, 8) == Link(cluster.between.bytes_per_s / 8, cluster.between.latency_s)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("Tesla T4", "T4"),
        ("NVIDIA T400", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_kinds_are_known_by_their_words(name: str, kind: str | None) -> None:
    found = kind_of(name)
    assert (found.name if found else None) == kind


def test_fp32_is_slower_by_more_than_its_bytes() -> None:
    wide, narrow = (
        plan_training(gpt(), cluster=H100, batch=64, seq_len=2048, dtype=dtype).best.time.total_s
        for dtype in ("fp32", "bf16")
    )
    assert wide > 8 * narrow


def device(index: int, name: str = "NVIDIA H100 80GB HBM3", **changes: Any) -> dict[str, Any]:
    links = {other: "nvlink" for other in range(4) if other != index}
    return {"index": index, "name": name, "memory_bytes": 85_000_000_000, "links": links, **changes}


def test_the_largest_equal_part_of_a_cluster_is_planned_for() -> None:
    whole = [{"state": NodeState.ALIVE, "devices": [device(i) for i in range(4)]} for _ in range(3)]
    broken = {
        "state": "alive",
        "devices": [device(i, quarantine="ecc" if i else "") for i in range(4)],
    }
    others = {"state": NodeState.ALIVE, "devices": [device(i, "Tesla T4") for i in range(8)]}
    dead = {"state": NodeState.DEAD, "devices": [device(i) for i in range(4)]}
    found = cluster_of([*whole, broken, others, dead], between=Link(5e9))
    assert (found.nodes, found.gpus_per_node, found.memory_bytes) == (3, 4, 85e9)
    assert found.inside.bytes_per_s > 100e9
    assert found.between.bytes_per_s == 5e9
    with pytest.raises(ValueError, match="no GPU of a known kind; its GPUs are Voodoo 2"):
        cluster_of([{"state": NodeState.ALIVE, "devices": [device(0, "Voodoo 2")]}])


def test_the_command_shows_plans_and_what_binds(tmp_path: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    common = ["plan", str(config), "--batch", "16", "--seq-len", "4096", "--gpu", "H100"]
    shown = CliRunner().invoke(train, [*common, "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["plans"][0]["strategy"]["data"] >= 1
    with pytest.raises(BadRequestError, match=r"nothing\.json cannot be read"):
        CliRunner().invoke(train, ["plan", "nothing.json", *common[2:]], catch_exceptions=False)
    shown = CliRunner().invoke(train, [*common, "--gpus-per-node", "1"])
    assert shown.exit_code == 1
    assert "no plan fits" in shown.output
    assert "GPU memory" in shown.output
    with pytest.raises(BadRequestError, match="GPU 'Voodoo' is not known"):
        CliRunner().invoke(train, [*common[:-1], "Voodoo"], catch_exceptions=False)
