"""The discrepancy driver over several processes, compiled, and inside Lightning and Accelerate."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from driven import BOTH, EAGER, driven, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from training import assert_same, batch, counts, make_model, weights

from torch_anderson import Anderson, Discrepancy

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """With statistics of batches in buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x):
        return self.layers(x)


# ------------------------------------------------------------------------------------------ several processes

BAD_STEP = 12


def batch_of(rank, i):
    x, y = batch(10 * i + rank, torch.float64)
    return x[rank::2], y[rank::2]


def never(rank, i):
    return False


def on_one_rank(rank, i):
    return rank == 1 and i >= BAD_STEP


def one_process(rank, folder, options, bad):
    """Train as one of two; what became of it goes to a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = DistributedDataParallel(Net())  # sends buffers around in its forward pass
    optimizer = Anderson(SGD(model.parameters(), lr=0.1), discrepancy=Discrepancy("mse", **options))
    for i in range(30):
        x, y = batch_of(rank, i)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step(outputs=lambda x=x, y=y, i=i: (model(x) * (float("nan") if bad(rank, i) else 1.0), y))
    found = {"weights": weights(model), "counts": counts(optimizer)}
    if optimizer.options.discrepancy.evaluates:
        with optimizer.accelerated_weights():
            found["accelerated"] = weights(model)
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def two_processes(folder, options, bad=never):
    torch.multiprocessing.spawn(one_process, (str(folder), options, bad), nprocs=2)
    return [torch.load(folder / str(rank)) for rank in range(2)]


@pytest.mark.parametrize("options", [{**EAGER, "held_out": True}, BOTH], ids=["held out", "both"])
def test_ranks_decide_alike_and_keep_the_same_weights(tmp_path, options):
    one, other = two_processes(tmp_path, options)
    assert one["counts"]["accepted"] > 0
    assert one["counts"] == other["counts"]
    assert_same(one["weights"], other["weights"])
    assert_same(one.get("accelerated", []), other.get("accelerated", []))


def test_outputs_that_one_rank_cannot_use_make_plain_steps_on_all(tmp_path):
    one, other = two_processes(tmp_path, BOTH, on_one_rank)
    assert one["counts"] == other["counts"]
    assert one["counts"]["skipped_nonfinite_outputs"] > 0
    assert one["counts"]["accepted"] > 0
    assert_same(one["weights"], other["weights"])


# ------------------------------------------------------------------------------------------------- compilation


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_compiled_once_and_driven_as_the_eager_one(in_place):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (model, optimizer), (twin, eager) = driven(model=Net()), driven(model=Net())
    compiled = model if in_place else torch.compile(model, backend="eager", fullgraph=True)
    if in_place:
        model.compile(backend="eager", fullgraph=True)
    for i in range(20):
        optimizer.zero_grad()
        x, y = batch(i, torch.float64)
        (compiled(x) - y).square().mean().backward()
        optimizer.step(outputs=lambda x=x, y=y: (compiled(x), y))
        train(twin, eager, i + 1, start=i)
    assert optimizer.stats.counts["accepted"] > 0
    assert counts(optimizer) == counts(eager)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# ------------------------------------------------------------------------------------ frameworks that own step


def loader():
    x, y = zip(*(batch(i) for i in range(20)), strict=True)
    return DataLoader(TensorDataset(torch.cat(x), torch.cat(y)), batch_size=32)


def assert_as_in_a_plain_loop(model, optimizer):
    twin, expected = driven("adamw_foreach", dtype=torch.float32)
    train(twin, expected, 20)
    assert optimizer.stats.counts["accepted"] > 0
    assert counts(optimizer) == counts(expected)
    assert_same(weights(model), weights(twin))


def test_lightning_gives_the_outputs_ahead(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def configure_optimizers(self):
            return driven("adamw_foreach", model=self.model)[1]

        def training_step(self, data, index):
            x, y = data
            self.optimizers().set_batch(outputs=lambda: (self.model(x), y))
            return (self.model(x) - y).square().mean()

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(default_root_dir=tmp_path, max_epochs=1, enable_checkpointing=False, **quiet)
        trainer.fit(module, loader())
    assert_as_in_a_plain_loop(module.model, trainer.optimizers[0])


def test_accelerate_gives_the_outputs_ahead():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = driven("adamw_foreach", dtype=torch.float32)
    model, prepared, batches = accelerator.prepare(model, optimizer, loader())
    for x, y in batches:
        accelerator.backward((model(x) - y).square().mean())
        prepared.optimizer.set_batch(outputs=lambda x=x, y=y: (model(x), y))
        prepared.step()
        prepared.zero_grad()
    assert_as_in_a_plain_loop(model, optimizer)
