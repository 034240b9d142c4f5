"""The flags that commands share."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

from ropeway.cli.options import add_engine_arguments, engine_options
from ropeway.cli.server_options import add_server_arguments
from ropeway.config import EngineConfig


def test_every_engine_option_has_a_flag_that_reaches_it() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    wanted = {field.name for field in fields(EngineConfig)} - {"served_model_name"}  # a flag of the server
    assert actions.keys() == wanted
    for name, action in actions.items():
        flag = action.option_strings[0]
        value = [] if action.nargs == 0 else [str(action.choices[0]) if action.choices else "1"]
        assert list(engine_options(parser.parse_args([flag, *value]))) == [name]
    assert engine_options(parser.parse_args([])) == {}


def test_every_flag_of_the_server_is_in_its_document() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(parser)
    add_server_arguments(parser)
    document = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    flags = [flag for action in parser._actions for flag in action.option_strings]
    assert len(flags) > 40
    assert not [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", document)]
