from drivetrain.integrations.hub.card import CardData as CardData
from drivetrain.integrations.hub.client import HubError as HubError
from drivetrain.integrations.hub.publish import Publish as Publish
from drivetrain.integrations.hub.upload import push as push
