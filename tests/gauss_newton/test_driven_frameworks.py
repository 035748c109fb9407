"""``GaussNewton`` inside Lightning, Accelerate and the Trainer of Hugging Face, which call ``step`` themselves."""

import warnings

import pytest
import torch
from tangent import decay, network
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset
from training import counts, weights

from torch_anderson import GaussNewton, Objective, Term

pytestmark = pytest.mark.slow

STEPS = 12
POINTS = torch.linspace(0, 1, 20, dtype=torch.float64).reshape(-1, 1)


def problem():
    """A model, its optimizer, and an equation at fixed points."""
    model = network()
    start = Term(lambda u, t: u(t) - 1, torch.zeros(1, 1, dtype=torch.float64))
    objective = Objective(model, inside=Term(decay, POINTS), start=start)
    return model, GaussNewton(Adam(model.parameters(), lr=1e-3)), objective


def assert_as_in_a_plain_loop(model, optimizer, step):
    twin, expected, objective = problem()
    torch.manual_seed(1)
    for _ in range(STEPS):
        step(expected, objective)
    assert optimizer.stats.counts["accepted"] > STEPS / 2
    assert counts(optimizer) == counts(expected)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)  # samples in another order


def test_in_lightning_a_jump_follows_the_step_of_the_base(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.optimizer, self.objective = problem()

        def configure_optimizers(self):
            return self.optimizer

        def training_step(self, data, index):
            self.optimizers().set_batch(self.objective)
            return self.objective.draw().loss()

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(default_root_dir=tmp_path, max_epochs=1, enable_checkpointing=False, **quiet)
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(TensorDataset(torch.zeros(STEPS)), batch_size=1))

    def step(optimizer, objective):
        def closure():
            optimizer.set_batch(objective)
            return objective()

        optimizer.step(closure)

    assert_as_in_a_plain_loop(module.model, trainer.optimizers[0], step)


def gradient_then_step(optimizer, objective):
    objective()
    optimizer.set_batch(objective)
    optimizer.step()


def test_in_accelerate_a_jump_replaces_the_step_of_the_base():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, objective = problem()
    prepared = accelerator.prepare(optimizer)
    torch.manual_seed(1)
    for _ in range(STEPS):
        prepared.zero_grad()
        accelerator.backward(objective.draw().loss())
        prepared.optimizer.set_batch(objective)
        prepared.step()
    assert_as_in_a_plain_loop(model, optimizer, gradient_then_step)


def test_in_the_trainer_of_hugging_face_a_jump_replaces_the_step_of_the_base(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, optimizer, objective = problem()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return {"loss": objective.draw().loss()}

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            optimizer.set_batch(objective)
            return model(**inputs)["loss"]

    arguments = transformers.TrainingArguments(
        *(str(tmp_path),), num_train_epochs=1, per_device_train_batch_size=1, lr_scheduler_type="constant",
        max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = [{"x": torch.zeros(1)} for _ in range(STEPS)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Trainer(Wrapped(), arguments, train_dataset=rows, optimizers=(optimizer, scheduler))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.trainer, "set_seed", lambda *_, **__: None, raising=False)
        torch.manual_seed(1)
        trainer.train()
    assert optimizer.stats.counts["accepted"] > STEPS / 2
    assert float(objective.draw().loss().detach()) < 1e-4


def test_what_is_no_objective_is_refused_by_name():
    _, optimizer, _ = problem()
    with pytest.raises(TypeError, match="Invalid objective: function"):
        optimizer.set_batch(lambda: 0)
