"""Where settings come from: the environment, then a YAML file, then the defaults.

| what is set | what is read |
|---|---|
| ``LMCACHE_CONFIG=histate`` | the defaults |
| ``LMCACHE_CONFIG=FILE`` | that file, strictly: an unknown key is an error |
| ``LMCACHE_CONFIG_FILE=FILE`` | that file, if it has a ``histate:`` section; LMCache's other words are ignored |

In each of these cases ``HISTATE_<SETTING>`` overrides one setting, of either section.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lmcache_histate.config.errors import ConfigError
from lmcache_histate.config.lmcache_words import IN_PROCESS_WORDS, REMEDIES
from lmcache_histate.config.model import SETTINGS, Config, default_of
from lmcache_histate.config.values import suggestion

DEFAULTS_WORD = "histate"
"""The value of ``LMCACHE_CONFIG`` that asks for the defaults instead of naming a file."""

ENVIRONMENT_NAMES: dict[str, str] = {f"HISTATE_{key.removeprefix('histate.').upper()}": key for key in SETTINGS}
"""``HISTATE_INTERVAL`` and so on, to the dotted key that each sets."""

# Kubernetes describes every service of a namespace to every pod, and a service may well be called "histate" or
# "histate-http". These variables are told from misspelt settings by their values.
_KUBERNETES_NAME = re.compile(r"HISTATE_(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.*)?|PORT_\d+_(?:TCP|UDP|SCTP).*)")
_KUBERNETES_URL = re.compile(r"(?:tcp|udp|sctp)://\S+")


@dataclass
class _Found:
    """Raw values by dotted key, where each was found, and what is wrong or ignored so far."""

    raw: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def load_config(environ: Mapping[str, str] | None = None) -> Config | None:
    """The configuration that `environ` (by default the process's environment) asks for; ``None`` if it asks for none.

    Reads the named file and nothing else; :func:`lmcache_histate.config.check_machine` looks at the machine.
    Raises :class:`ConfigError` naming every problem.
    """
    environ = os.environ if environ is None else environ
    found = _Found()
    source = environ.get("LMCACHE_CONFIG", "").strip()
    if source and source != DEFAULTS_WORD:
        section = _read_mapping(source, "LMCACHE_CONFIG")
        _collect_file(section, source, found, strict=True)
    elif not source:
        source = environ.get("LMCACHE_CONFIG_FILE", "").strip()
        if not source:
            return None
        if not _mentions_section(source):
            return None
        section = _read_mapping(source, "LMCACHE_CONFIG_FILE")
        if not any(entry.key == "histate" for entry in _entries(section)):
            return None
        _collect_file(section, source, found, strict=False)
    _collect_environment(environ, found)
    return _build(found, source)


def load_config_or_defaults(environ: Mapping[str, str] | None = None) -> Config:
    """Like :func:`load_config`, but as if ``LMCACHE_CONFIG=histate`` where nothing asks for a configuration.

    For callers that a user has named explicitly, so that being configured is not in question: ``HISTATE_*`` counts.
    """
    environ = os.environ if environ is None else environ
    config = load_config(environ)
    if config is None:
        config = load_config({**environ, "LMCACHE_CONFIG": DEFAULTS_WORD})
        assert config is not None  # the word always gives one
    return config


def _mentions_section(source: str) -> bool:
    """Whether the file may hold a ``histate:`` section at all.

    A file that never says "histate" is LMCache's alone: whatever is wrong with it is LMCache's to report.
    """
    try:
        return b"histate" in Path(source).read_bytes()
    except OSError:
        return False


def _read_mapping(source: str, variable: str) -> yaml.MappingNode | None:
    """The top-level mapping of a YAML file as nodes, which know their lines; ``None`` for an empty file."""
    try:
        text = Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = suggestion(source, (DEFAULTS_WORD,)) if "/" not in source else ""
        raise ConfigError(
            f"{source}: there is no such file. Correct {variable}, or set LMCACHE_CONFIG={DEFAULTS_WORD} for the "
            f"defaults.{hint}"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{source}: this is a folder. Set {variable} to a YAML file in it.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not a text in UTF-8 ({error}). Save it as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror}). Correct {variable} or the file.") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark is not None else source
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML ({what}). Check the indentation and the quotes there.") from None
    if node is None:
        return None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{source}:{node.start_mark.line + 1}: expected lines of the form 'key: value'.")
    return node


@dataclass(frozen=True)
class _Entry:
    """One key of a mapping in the file, the line it stands on, and the line of an earlier one with the same name."""

    key: str
    line: int
    node: yaml.Node
    earlier_line: int | None


def _entries(node: yaml.MappingNode | None) -> list[_Entry]:
    """The entries of a mapping, YAML's merges (``<<``) resolved, in file order."""
    if node is None:
        return []
    first_lines: dict[str, int] = {}
    earlier: dict[int, int] = {}
    for key_node, _ in node.value:
        key, line = _key_text(key_node), key_node.start_mark.line + 1
        if key in first_lines and key != "<<":
            earlier[line] = first_lines[key]
        first_lines.setdefault(key, line)
    # A merge puts what it brings before the mapping's own entries, which thereby win.
    yaml.SafeLoader("").flatten_mapping(node)
    own: dict[tuple[str, int | None], _Entry] = {}
    for key_node, value_node in node.value:
        key, line = _key_text(key_node), key_node.start_mark.line + 1
        own[key, earlier.get(line)] = _Entry(key, line, value_node, earlier.get(line))
    return list(own.values())


def _key_text(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else "?"


def _collect_file(node: yaml.MappingNode | None, source: str, found: _Found, *, strict: bool) -> None:
    for entry in _entries(node):
        if entry.key != "histate":
            _collect_entry(entry, "", source, found, strict=strict)
        elif entry.earlier_line is not None:
            found.problems.append(
                f"{source}:{entry.line}: histate: already begun in line {entry.earlier_line}. Join the two sections."
            )
        elif isinstance(entry.node, yaml.MappingNode):
            for inner in _entries(entry.node):
                _collect_entry(inner, "histate.", source, found, strict=True)
        elif _construct(entry.node) is not None:
            found.problems.append(
                f"{source}:{entry.line}: histate: expected a section. Put its settings below it, indented, for "
                "example 'interval: adaptive'."
            )


def _collect_entry(entry: _Entry, prefix: str, source: str, found: _Found, *, strict: bool) -> None:
    key, where = prefix + entry.key, f"{source}:{entry.line}"
    if entry.earlier_line is not None:
        found.problems.append(
            f"{where}: {key}: already set in {source}:{entry.earlier_line}. Keep one of the two lines."
        )
        return
    if key not in SETTINGS:
        if strict or key not in IN_PROCESS_WORDS:
            found.problems.append(f"{where}: {key}: {_unknown(key)}")
        else:
            remedy = REMEDIES.get(key, "remove the line, or leave it for deployments without HiState")
            found.ignored.append(f"{where}: {key}: ignored, LMCache's server does not use it ({remedy}).")
        return
    try:
        value = _construct(entry.node)
    except yaml.YAMLError as error:
        found.problems.append(f"{where}: {key}: not a plain value ({getattr(error, 'problem', error)}).")
        return
    if value is None and default_of(key) is not None:
        found.problems.append(
            f"{where}: {key}: has no value. Write one, or remove the line to use the default, {default_of(key)!r}."
        )
        return
    found.raw[key] = value
    found.origins[key] = where


def _construct(node: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_object(node, deep=True)


def _unknown(key: str) -> str:
    """What to say about a key that is no setting."""
    section, _, bare = key.rpartition(".")
    other = bare if section else f"histate.{bare}"
    if other in SETTINGS:
        place = "at the top level" if section else "in the section 'histate:'"
        return f"stands in the wrong place. Move it: it belongs {place}."
    if bare in IN_PROCESS_WORDS:
        remedy = REMEDIES.get(bare)
        return f"a setting of LMCache's in-process mode that has no meaning here. {_sentence(remedy)}Remove the line."
    return f"unknown setting.{suggestion(key, tuple(SETTINGS)) or ' Run `histate config --help` for the list.'}"


def _sentence(text: str | None) -> str:
    return f"{text[0].upper()}{text[1:]}. " if text else ""


def _collect_environment(environ: Mapping[str, str], found: _Found) -> None:
    for name in sorted(environ):
        if not name.startswith("HISTATE_"):
            continue
        key = ENVIRONMENT_NAMES.get(name)
        text = environ[name].strip()
        if _KUBERNETES_NAME.fullmatch(name) or (name.endswith("_PORT") and _KUBERNETES_URL.fullmatch(text)):
            continue
        if key is None:
            near = suggestion(name, tuple(ENVIRONMENT_NAMES))
            found.problems.append(
                f"environment {name}: unknown setting.{near or ' Run `histate config --help` for the list.'}"
            )
            continue
        if not text:
            continue  # set but empty: what templates leave behind for "not given"
        switched_off = text.lower() in {"none", "null"} and default_of(key) is None
        found.raw[key] = None if switched_off else text
        found.origins[key] = f"environment {name}"


def _build(found: _Found, source: str) -> Config:
    data: dict[str, Any] = {"histate": {}}
    for key, value in found.raw.items():
        if key.startswith("histate."):
            data["histate"][key.removeprefix("histate.")] = value
        else:
            data[key] = value
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(found.problems + _explain(error, found.origins, source)) from None
    if found.problems:
        raise ConfigError(found.problems)
    # Pydantic keeps private attributes out of validation, comparison of fields and dumps, which is what is wanted.
    config._origins.update(found.origins)
    config._ignored = tuple(found.ignored)
    config._source = source
    return config


def _explain(error: ValidationError, origins: Mapping[str, str], source: str) -> list[str]:
    problems = []
    for item in error.errors(include_url=False):
        context = item.get("ctx", {})
        if item["type"] == "histate":
            key, text = context["key"], context["text"]
        else:
            # Members of a union add their own names behind the key; a setting is at most two names deep.
            path = [str(part) for part in item["loc"]]
            key = ".".join(path[:2]) if path[:1] == ["histate"] else path[0] if path else ""
            text = str(context["error"]) if "error" in context else item["msg"]
        text_key = f"{origins.get(key, source)}: {key}: {text}"
        if text_key not in problems:
            problems.append(text_key)
    return problems
