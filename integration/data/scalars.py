"""Scalars that a run of the trainer left for TensorBoard."""

from pathlib import Path


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Returns name -> step -> value of every event file below a folder.

    Files are read in the order of their names, which begin with a time: where two hold the same
    name and step, the later one counts.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob("events.out.*")):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            values = {event.step: event.value for event in events.Scalars(name)}
            scalars.setdefault(name, {}).update(values)
    return scalars
