"""``GaussNewton`` with compiled models, and inside Lightning, Accelerate and the Trainer of Hugging Face."""

import warnings

import pytest
import torch
from driven import driven, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import assert_same, batch, counts, make_model, weights

from torch_anderson._gauss_newton.state import FIXED

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """A model with statistics of batches in buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_compiled_once_and_driven_as_the_eager_one(in_place):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (model, optimizer), (twin, eager) = driven(model=Net()), driven(model=Net())
    compiled = model if in_place else torch.compile(model, backend="eager", fullgraph=True)
    if in_place:
        model.compile(backend="eager", fullgraph=True)
    for i in range(30):
        optimizer.zero_grad()
        x, y = batch(i, torch.float64)
        (compiled(x) - y).square().mean().backward()
        optimizer.step(outputs=lambda x=x, y=y: (compiled(x), y))
        train(twin, eager, i + 1, start=i)
    assert optimizer.stats.counts["accepted"] > 0
    assert counts(optimizer) == counts(eager)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# -------------------------------------------------------------------------------------- frameworks that own the step

STEPS = 30


def data():
    x, y = zip(*(batch(i) for i in range(STEPS)), strict=True)
    return TensorDataset(torch.cat(x), torch.cat(y))


def loader():
    return DataLoader(data(), batch_size=32)


def assert_as_in_a_plain_loop(model, optimizer):
    twin, expected = driven("adamw_foreach", dtype=torch.float32)
    train(twin, expected, STEPS)
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
    optimizer._driver.state.samples = FIXED  # as in ``driven``; accelerate loads a state without any
    for x, y in batches:
        accelerator.backward((model(x) - y).square().mean())
        prepared.optimizer.set_batch(outputs=lambda x=x, y=y: (model(x), y))
        prepared.step()
        prepared.zero_grad()
    assert_as_in_a_plain_loop(model, optimizer)


def test_the_trainer_of_hugging_face_gives_the_outputs_ahead(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def forward(self, x, y):
            return {"loss": (self.model(x) - y).square().mean()}

    wrapped = Wrapped()
    optimizer = driven("adamw_foreach", model=wrapped.model)[1]

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            optimizer._driver.state.samples = FIXED  # as in ``driven``; the Trainer loads a state without any
            optimizer.set_batch(outputs=lambda: (wrapped.model(inputs["x"]), inputs["y"]))
            return model(**inputs)["loss"]

    arguments = transformers.TrainingArguments(
        *(str(tmp_path),), num_train_epochs=1, per_device_train_batch_size=32, lr_scheduler_type="constant",
        max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = [{"x": x, "y": y} for x, y in data()]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    Trainer(wrapped, arguments, train_dataset=rows, optimizers=(optimizer, scheduler)).train()
    assert_as_in_a_plain_loop(wrapped.model, optimizer)
