"""Messages count one thing in the singular."""

from formats.wording import are, counted


def test_one_thing_is_no_plural() -> None:
    assert f"{counted(1, 'tensor')} {are(1)} missing" == "1 tensor is missing"
    assert f"{counted(2, 'tensor')} {are(2)} missing" == "2 tensors are missing"
    assert counted(0, "tensor") == "0 tensors"
    assert counted(1, "matrix", "matrices") == "1 matrix"
    assert counted(12345, "matrix", "matrices") == "12,345 matrices"
