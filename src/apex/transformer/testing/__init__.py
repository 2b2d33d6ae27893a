"""What tests of programs with several ranks share; on a CPU the ranks talk over Gloo."""

from apex._upstream.missing import explain_attributes

__all__: list[str] = []

explain_attributes(__name__)
