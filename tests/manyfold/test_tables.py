"""One table as Markdown, LaTeX and CSV, by hand."""

from manyfold.tables import comma_separated, latex, markdown, number, write_table

ROWS = [["env", "share"], ["a, b", "12%"], ["c", ""]]


def test_each_form_by_hand():
    assert markdown(ROWS) == "| env | share |\n| --- | --- |\n| a, b | 12% |\n| c |  |\n"
    assert comma_separated(ROWS) == 'env,share\n"a, b",12%\nc,\n'
    assert latex(ROWS) == (
        "\\begin{tabular}{lr}\n\\hline\nenv & share \\\\\n"
        "\\hline\na, b & 12\\% \\\\\nc &  \\\\\n\\hline\n\\end{tabular}\n"
    )


def test_a_bar_in_a_cell_does_not_end_it():
    assert markdown([["a|b"], ["c"]]) == "| a\\|b |\n| --- |\n| c |\n"


def test_forms_are_files_beside_one_another(tmp_path):
    name = "table"
    write_table(ROWS, tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{name}.{form}" for form in ("csv", "md", "tex")]
    assert (tmp_path / f"{name}.md").read_text() == markdown(ROWS)
    assert (tmp_path / f"{name}.csv").read_text() == comma_separated(ROWS)
    assert (tmp_path / f"{name}.tex").read_text() == latex(ROWS)


def test_only_the_forms_that_are_asked_for(tmp_path):
    write_table(ROWS, tmp_path / "table", ("md",))
    assert [p.name for p in tmp_path.iterdir()] == ["table.md"]


def test_a_cell_without_a_number_is_empty():
    assert (number(None), number(0.12345), number(1, 1)) == ("", "0.123", "1.0")
