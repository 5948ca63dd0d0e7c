"""Attributes of a Trainer that Lightning does not declare, under the names that it has for them."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer

from lit_callbacks import CollapseDetector, CollapseEarlyStopping, NonFiniteMonitor
from lit_callbacks.trainer_attributes import find_callbacks, is_dry_run, log_interval


def test_attributes_are_those_that_the_trainer_was_made_with() -> None:
    detector = CollapseDetector([NonFiniteMonitor()])
    stopping = CollapseEarlyStopping()
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[detector, Timer(), stopping],
        logger=False,
        log_every_n_steps=7,
        enable_checkpointing=False,
    )
    assert find_callbacks(trainer, CollapseDetector) == [detector, stopping]
    assert find_callbacks(trainer, CollapseEarlyStopping) == [stopping]
    assert log_interval(trainer) == 7
    assert not is_dry_run(trainer)
    assert is_dry_run(Trainer(accelerator="cpu", fast_dev_run=True))
