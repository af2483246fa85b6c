from drivetrain.integrations.ray.report import RayReport as RayReport
from drivetrain.integrations.ray.tune import trainable as trainable
