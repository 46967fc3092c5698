"""Connectors: tools that a toolset's name adds, such as `files+sql`. They run in the sandbox, never in the server.

    server: toolrunner -> envd/server/connectors.py starts python3 in the sandbox, with these sources as arguments
    sandbox: main.py loads the tool's modules -> run(arguments) -> Answer.frame() on standard output -> server: Output

`answers` is what they have in common. `sql`, `web` (the tool `http`) and `browse` end with their call; the browser
keeps its state in files. `interpreter` (the tool `python`) passes code to `resident`, a process that outlives the call.

Everything here runs with the standard library of Python 3.9 or newer, without this package being installed.
"""
