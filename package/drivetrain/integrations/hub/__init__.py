"""The Hugging Face Hub: upload models and checkpoints while a run trains, and resume from there."""

from typing import TYPE_CHECKING

from drivetrain.core.lazy import exports

if TYPE_CHECKING:
    from drivetrain.integrations.hub.card import CardData
    from drivetrain.integrations.hub.client import HubError
    from drivetrain.integrations.hub.publish import Publish
    from drivetrain.integrations.hub.upload import push
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.integrations.hub.card": ("CardData",),
            "drivetrain.integrations.hub.client": ("HubError",),
            "drivetrain.integrations.hub.publish": ("Publish",),
            "drivetrain.integrations.hub.upload": ("push",),
        },
    )

__all__ = ["CardData", "HubError", "Publish", "push"]
