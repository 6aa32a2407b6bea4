"""ModelWeightControl: one of several models replaced, put to sleep and woken by hand, in turn with the others."""

from __future__ import annotations

import logging

from server.backend import InFlight, Unavailable
from server.models.resident import Resident
from server.models.turns import ModelTurns

logger = logging.getLogger(__name__)


class ModelWeightControl:
    """See `WeightControl`. What wakes a model waits for room as its requests do, and raises `Unavailable` as they
    do."""

    def __init__(self, turns: ModelTurns, resident: Resident) -> None:
        self._turns, self._model = turns, resident

    async def sleep(self, level: int, in_flight: InFlight) -> None:
        """Until `wake` or `update_weights`: requests don't wake it, and those that wait are refused."""
        model = self._model
        was_kept_asleep, model.is_kept_asleep = model.is_kept_asleep, True
        model.refuse(Unavailable(model.asleep_by_hand))
        try:
            if in_flight == "finish" and model.is_awake:
                await model.is_quiet.wait()
            async with self._turns.one_change:
                await model.control.sleep(level, "pause")
                model.is_awake = False
                logger.info("%s sleeps (level %d) until it is woken by hand", model.name, level)
        except BaseException:
            model.is_kept_asleep = was_kept_asleep
            raise
        finally:
            self._turns.look()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._model.is_kept_asleep = False
        async with self._turns.inside(self._model):
            pass

    async def update_weights(self, model: str, in_flight: InFlight) -> int:
        """See `Engine.update_weights`; returns the version. A model that sleeps wakes with the new weights, without
        those before."""
        resident = self._model
        resident.is_kept_asleep = False
        wakes_with_them = not resident.is_awake and resident.new_weights is None
        if wakes_with_them:
            resident.new_weights = model
        try:
            async with self._turns.inside(resident):
                if wakes_with_them and resident.new_weights is None:
                    return resident.backend.stats().weights_version
                return await resident.control.update_weights(model, in_flight)
        except Unavailable as error:
            if isinstance(error.__cause__, ValueError):  # the weights don't fit, and the caller can mend it
                raise error.__cause__ from error
            raise
        finally:
            if wakes_with_them:
                resident.new_weights = None
            resident.is_awake = not resident.backend.stats().is_asleep
            self._turns.look()
