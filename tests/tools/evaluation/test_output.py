import io

import pytest
from rich.console import Console
from rich.table import Table

from lit_rlhf.tools.evaluation import output


def test_text_is_printed_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=20)
    text = "[bold]x[/bold] :smile: 3.5 and 铁、铜"
    output.print_text(console, text)
    assert console.file.getvalue() == f"{text}\n"


def test_a_model_cannot_steer_the_terminal() -> None:
    assert output.remove_control_characters("a\x1b[2Jb\x07\r\x9b31mc\n\td") == "a[2Jb31mc\n\td"


def test_names_in_tables_and_progress_bars_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    name = "[red]runs[/red]/[/] :smile:"
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    output.print_table(table)
    with output.progress_bar(f"responses of {name}", 1):
        pass
    printed = capsys.readouterr()
    assert printed.out.count(name) == 3
    assert f"responses of {name}" in printed.err
