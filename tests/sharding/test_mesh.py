import jax
import pytest
from jax.sharding import AxisType

from sharding.mesh import TENSOR, make_mesh


def test_a_mesh_over_chosen_devices_in_their_order():
    mesh = make_mesh((5, 2))
    assert [device.id for device in mesh.devices.flat] == [5, 2]
    assert mesh.axis_names == (TENSOR,)
    assert mesh.axis_types == (AxisType.Explicit,)
    assert make_mesh((0,)) == make_mesh((0,)) != make_mesh((1,))


def test_numbers_are_places_among_the_devices_given():
    devices = jax.devices()[4:6]
    assert [device.id for device in make_mesh((1, 0), devices).devices.flat] == [5, 4]


def test_a_device_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"device 8 does not exist: this machine has 8 cpu device\(s\), numbered from 0; --cpu-devices N"):
        make_mesh((0, 8))
