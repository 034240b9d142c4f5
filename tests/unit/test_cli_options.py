"""The flags that commands share."""

from __future__ import annotations

import argparse
from dataclasses import fields

from ropeway.cli.options import add_engine_arguments, engine_options
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
