"""Training inside Lightning, Fabric, Accelerate and the Hugging Face Trainer, against plain loops."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import BASES, EAGER, GRADIENTS, assert_same, batch, counts, eager, make_model, weights

from torch_anderson import Anderson

pytestmark = pytest.mark.slow
BATCHES = 12
EVERY_BASE = pytest.mark.parametrize("base", ["momentum", "adamw_foreach", "adamw_fused"])
BOTH = pytest.mark.parametrize("options", [EAGER, GRADIENTS], ids=["step", "gradient"])
GUARDED = pytest.mark.parametrize("options", [{"safeguard": "loss"}, GRADIENTS], ids=["step", "gradient"])


def dataset():
    x, y = zip(*(batch(i) for i in range(BATCHES)), strict=True)
    return TensorDataset(torch.cat(x), torch.cat(y))


def loader():
    return DataLoader(dataset(), batch_size=32)


def accelerated(model, base, **options):
    return Anderson(BASES[base](model.parameters()), **eager(**options))


def loss_of(model, data):
    x, y = data
    return (model(x) - y).square().mean()


def plain_loop(base, epochs=1, accumulate=1, guarded=False, **options):
    """What every framework must come to."""
    model = make_model()
    optimizer = accelerated(model, base, **options)
    for _ in range(epochs):
        for i, data in enumerate(loader()):
            (loss_of(model, data) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                loss_fn = (lambda data=data: loss_of(model, data)) if guarded else None
                optimizer.step(loss_fn=loss_fn)
                optimizer.zero_grad()
    return model, optimizer


def assert_as_in(expected, model, optimizer):
    plain, reference = expected
    assert_same(weights(model), weights(plain))
    assert counts(optimizer) == counts(reference)
    assert reference.stats.as_dict()["attempted"] > 0


# --------------------------------------------------------------------------------- Lightning and Fabric

lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):
    def __init__(self, base, manual=False, **options):
        super().__init__()
        self.model, self.base, self.options = make_model(), base, options
        self.automatic_optimization = not manual
        self.calls = 0

    def configure_optimizers(self):
        return accelerated(self.model, self.base, **self.options)

    def training_step(self, data, index):
        self.calls += 1
        loss = loss_of(self.model, data)
        optimizer = self.optimizers()
        if self.options.get("safeguard") == "loss":
            optimizer.set_batch(loss_fn=lambda: loss_of(self.model, data))
        if not self.automatic_optimization:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


def fit(module, folder, ckpt_path=None, **options):
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(default_root_dir=folder, **{**quiet, "enable_checkpointing": False, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


@EVERY_BASE
@BOTH
@pytest.mark.parametrize("manual", [False, True])
def test_lightning_trains_as_a_plain_loop_and_calls_training_step_once_a_batch(tmp_path, base, manual, options):
    module = Module(base, manual, **options)
    trainer = fit(module, tmp_path, max_epochs=2)
    assert module.calls == 2 * BATCHES
    assert_as_in(plain_loop(base, epochs=2, **options), module.model, trainer.optimizers[0])


def test_lightning_gives_the_batch_ahead(tmp_path):
    module = Module("adamw_foreach", safeguard="loss")
    trainer = fit(module, tmp_path, max_epochs=1)
    expected = plain_loop("adamw_foreach", guarded=True, safeguard="loss")
    assert expected[1].stats.as_dict()["extra_evaluations"] > 0
    assert_as_in(expected, module.model, trainer.optimizers[0])


@BOTH
def test_lightning_accumulates_as_a_plain_loop(tmp_path, options):
    module = Module("momentum", **options)
    trainer = fit(module, tmp_path, max_epochs=2, accumulate_grad_batches=2)
    assert module.calls == 2 * BATCHES
    assert_as_in(plain_loop("momentum", epochs=2, accumulate=2, **options), module.model, trainer.optimizers[0])


@EVERY_BASE
@pytest.mark.parametrize("options", [{"safeguard": "residual", "period": 4}, GRADIENTS], ids=["step", "gradient"])
def test_lightning_resumes_bit_for_bit(tmp_path, base, options):
    trainer = fit(Module(base, **options), tmp_path, max_epochs=1, enable_checkpointing=True)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    module = Module(base, **options)
    trainer = fit(module, tmp_path, max_epochs=2, ckpt_path=tmp_path / "middle.ckpt")
    assert_as_in(plain_loop(base, epochs=2, **options), module.model, trainer.optimizers[0])


def test_groups_assigned_through_lightnings_subclass_reach_the_base():
    from lightning.pytorch.core.optimizer import LightningOptimizer

    optimizer = accelerated(make_model(), "sgd")
    wrapped = LightningOptimizer(optimizer)
    assert isinstance(wrapped, Anderson) and len(wrapped.param_groups) == 1
    wrapped.param_groups = [{**group, "lr": 0.5} for group in wrapped.param_groups]
    assert optimizer.base.param_groups[0]["lr"] == 0.5


@EVERY_BASE
@GUARDED
def test_fabric_trains_and_resumes_as_a_plain_loop(tmp_path, base, options):
    def setup():
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        model = make_model()
        return fabric, *fabric.setup(model, accelerated(model, base, **options))

    def epoch(fabric, model, optimizer):
        for data in fabric.setup_dataloaders(loader()):
            loss = loss_of(model, data)
            fabric.backward(loss)
            optimizer.set_batch(loss_fn=lambda data=data: loss_of(model, data))
            optimizer.step()
            optimizer.zero_grad()

    fabric, model, optimizer = setup()
    epoch(fabric, model, optimizer)
    fabric.save(tmp_path / "middle.ckpt", {"model": model, "optimizer": optimizer})
    fabric, model, optimizer = setup()
    fabric.load(tmp_path / "middle.ckpt", {"model": model, "optimizer": optimizer})
    epoch(fabric, model, optimizer)
    assert_as_in(plain_loop(base, epochs=2, guarded=True, **options), model, optimizer)


# ------------------------------------------------------------------------------- Accelerate and Trainer


@EVERY_BASE
@pytest.mark.parametrize("accumulate", [1, 2])
@GUARDED
def test_accelerate_trains_and_resumes_as_a_plain_loop(tmp_path, base, accumulate, options):
    accelerate = pytest.importorskip("accelerate")

    def setup():
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = make_model()
        prepared = accelerator.prepare(model, accelerated(model, base, **options), loader())
        return accelerator, *prepared

    def epoch(accelerator, model, optimizer, batches):
        for data in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model, data)
                accelerator.backward(loss)
                optimizer.optimizer.set_batch(loss_fn=lambda data=data: loss_of(model, data))
                optimizer.step()
                optimizer.zero_grad()

    run = setup()
    epoch(*run)
    run[0].save_state(tmp_path)
    run = setup()
    run[0].load_state(tmp_path)
    epoch(*run)
    expected = plain_loop(base, epochs=2, accumulate=accumulate, guarded=True, **options)
    assert_as_in(expected, run[1], run[2].optimizer)


class ForTrainer(nn.Module):
    """What the Trainer wants of a model: named inputs, and a dictionary with the loss."""

    def __init__(self):
        super().__init__()
        self.model = make_model()

    def forward(self, x, labels):
        return {"loss": loss_of(self.model, (x, labels))}


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = dataset()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = self.rows[i]
        return {"x": x, "labels": y}


def trainer_for(folder, how, max_steps, options):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=32,
        max_steps=max_steps,
        save_steps=7,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = ForTrainer()
    if how == "class":
        cls = Anderson.wrapping(torch.optim.AdamW, **options)
        given = {"optimizer_cls_and_kwargs": (cls, {"lr": 1e-2})}
    else:
        optimizer = Anderson(torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
        given = {"optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.Trainer(model=model, args=arguments, train_dataset=Rows(), **given)


@pytest.mark.parametrize("how", ["class", "instance"])
@pytest.mark.parametrize("options", [EAGER | {"safeguard": "residual"}, GRADIENTS], ids=["step", "gradient"])
def test_the_trainer_resumes_bit_for_bit(tmp_path, how, options):
    whole = trainer_for(tmp_path / "whole", how, 14, options)
    whole.train()
    resumed = trainer_for(tmp_path / "resumed", how, 14, options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-7"))
    assert_same(weights(resumed.model), weights(whole.model))
    ours, theirs = resumed.optimizer.optimizer, whole.optimizer.optimizer
    assert isinstance(ours, Anderson)
    assert counts(ours) == counts(theirs)
    assert counts(theirs).keys() & {"attempted", "skipped_noisy"}


@BOTH
def test_a_framework_that_copies_the_optimizer_gets_a_working_one(options):
    model, optimizer = plain_loop("adamw_foreach", **options)
    twin, other = copy.deepcopy((model, optimizer))
    for run, opt in ((model, optimizer), (twin, other)):
        for data in loader():
            loss_of(run, data).backward()
            opt.step()
            opt.zero_grad()
    assert_as_in((model, optimizer), twin, other)
