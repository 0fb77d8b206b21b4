"""The table of a step: what its columns come to."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stoker_train.elastic.optimization import STEP_FIELDS, StepRow, StepTable


def test_a_table_adds_up_its_rows() -> None:
    table = StepTable.of(
        StepRow(loss_sum=6.0, size=3, share=1, known_order=7, elapsed_s=5.5),
        StepRow(loss_sum=1.0, size=1, share=2, known_order=4, elapsed_s=9.0),
    )
    assert (table.replicas, table.batch, table.loss) == (2, 3.0, 1.75)
    assert (table.agreed_order, table.elapsed_s, table.finite) == (4, 5.5, True)
    assert table.column("known_order").tolist() == [7.0, 4.0]
    assert not StepTable.of(StepRow(), StepRow(finite=0.0)).finite
    assert math.isnan(StepTable.of(StepRow()).loss)


def test_a_row_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="do all ranks run one version"):
        StepTable(np.zeros((2, len(STEP_FIELDS) + 1)))
