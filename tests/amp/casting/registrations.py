"""Registrations and decorators of amp, by the kind of their cast."""

from apex import amp

REGISTER = {
    "half": amp.register_half_function,
    "float": amp.register_float_function,
    "promote": amp.register_promote_function,
}
DECORATE = {
    "half": amp.half_function,
    "float": amp.float_function,
    "promote": amp.promote_function,
}
