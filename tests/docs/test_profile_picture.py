"""The picture of a profile in the guide Performance shows the names of today."""

from load_scripts import tool


picture = tool("profile_picture")


def test_the_picture_of_a_profile_has_the_names_of_the_compiled_step():
    # If they changed: `python tools/profile_picture.py`.
    assert picture.draw(picture.names()) == picture.FILE.read_text(encoding="utf-8")
