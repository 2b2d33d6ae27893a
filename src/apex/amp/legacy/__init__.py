"""The API of 2017 to 2019: ``amp.init`` and its handles, ``_amp_state``, the scaler's old methods.

Nothing else imports it but ``apex.amp`` itself, the paths that these modules had, and
``apex.fp16_utils``.
"""

__all__: list[str] = []
