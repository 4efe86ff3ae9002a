from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from knnper.server.run import scalar_writer


def test_a_resumed_curve_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    with scalar_writer(tmp_path, first_round=1) as write:
        for server_round in (1, 2, 3):
            write({"server_round": server_round, "train_loss": float(server_round)})
    with scalar_writer(tmp_path, first_round=2) as write:
        write({"server_round": 2, "train_loss": 20.0, "num_failed": 1})
    curves = EventAccumulator(str(tmp_path))
    curves.Reload()
    assert sorted(curves.Tags()["scalars"]) == ["num_failed", "train_loss"]
    losses = [(event.step, event.value) for event in curves.Scalars("train_loss")]
    assert losses == [(1, 1.0), (2, 20.0)]
