"""Tables as text."""

from knnper.simulation.reports.tables import Table


def test_a_table_is_markdown_that_can_be_read_as_it_is() -> None:
    table = Table("t", ("method", "n", "share hurt"), (("kNN-Per", "4", "0.0 %"),))
    assert table.as_markdown().splitlines() == [
        "| method  |   n | share hurt |",
        "| ------- | --: | ---------: |",
        "| kNN-Per |   4 |      0.0 % |",
    ]


def test_a_cell_stays_one() -> None:
    table = Table.of_cells("t", [["name", "x"], ["a|b\nc", "1|2"]])
    assert table.as_markdown().splitlines() == [
        "| name   |    x |",
        "| ------ | ---: |",
        r"| a\|b c | 1\|2 |",
    ]


def test_without_rows_there_is_a_header() -> None:
    assert Table("t", ("a",), ()).as_markdown() == "| a   |\n| --- |\n"
