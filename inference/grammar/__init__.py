"""Grammars that tool calls are sampled under.

    toolset -> tools_grammar -> text of a structural tag -> SamplingParams.grammar -> compiled -> Matcher of a request

Text outside calls is free, except for a lone end of a call. A call that ends is valid: JSON of a listed tool with the
arguments of its schema. The grammars are xgrammar's; needs the extra `grammar`.
"""

ANY_TEXT = '{"type":"structural_tag","format":{"type":"any_text"}}'
"""Grammar that allows everything."""
