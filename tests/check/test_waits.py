import pandas as pd

from mrv2lab.check.waits import CAUSES, waits_by_cause
from mrv2lab.observer import Mark


def test_every_wait_has_one_cause() -> None:
    marks = [
        Mark("kernel", "argmax", wait_ns=99),
        Mark("record", "prepare_inputs"),
        Mark("synchronize", "prepare_inputs", "main", wait_ns=5),
        Mark("synchronize", "prepare_inputs", "main", wait_ns=7),
        Mark("synchronize", "sampled.0.copied", "copy", wait_ns=11),
        Mark("implicit_sync", "item", "main", wait_ns=13),
        Mark("queue_full", "main", "main", wait_ns=17),
        Mark("synchronize", "main", "main", wait_ns=19),
    ]
    expected = pd.DataFrame(
        {"waits": [2, 1, 1, 1, 1], "wait_ns": [12, 11, 13, 17, 19]},
        index=pd.Index(["barrier", "output", "implicit", "queue_full", "explicit"], name="cause"),
    )
    pd.testing.assert_frame_equal(waits_by_cause(marks), expected)


def test_no_marks_no_waits() -> None:
    empty = waits_by_cause([])
    assert list(empty.index) == list(CAUSES)
    assert int(empty.to_numpy().sum()) == 0
