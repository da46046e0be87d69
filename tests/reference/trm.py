"""TRM and HRM (spec 2 section 4) in plain NumPy float64: one segment of the recursion.

A net is a function (x, z) -> z of one sample (T, D).
"""


def segment(net, x, z_h, z_l, h_cycles=3, l_cycles=6):
    """TRM: h_cycles × { l_cycles × z_L ← net(z_L; z_H + x); then z_H ← net(z_H; z_L) }."""
    return two_networks(net, net, x, z_h, z_l, h_cycles, l_cycles)


def two_networks(low, high, x, z_h, z_l, h_cycles, l_cycles):
    """HRM: the same with one network for each state."""
    for _ in range(h_cycles):
        for _ in range(l_cycles):
            z_l = low(z_h + x, z_l)
        z_h = high(z_l, z_h)
    return z_h, z_l


def single_state(net, x, z, h_cycles, l_cycles):
    """z ← net(z; x), as often as the two states together are updated."""
    for _ in range(h_cycles * (l_cycles + 1)):
        z = net(x, z)
    return z


def levels(net, x, z_h, z_l, h_cycles, l_cycles):
    """Several low states, updated in order, each from the input and all the others."""
    z_l = list(z_l)
    for _ in range(h_cycles):
        for _ in range(l_cycles):
            for i in range(len(z_l)):
                others = [z_l[j] for j in range(len(z_l)) if j != i]
                z_l[i] = net(x + z_h + sum(others), z_l[i])
        z_h = net(sum(z_l), z_h)
    return z_h, z_l
