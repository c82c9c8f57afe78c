"""What every version of the noise must give: published and committed values."""

ONES = 0xFFFFFFFF
# Counter, seed, output of philox4x32 with 10 rounds: known answers published with Random123 (kat_vectors).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES << 32) | ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0x299F31D0 << 32) | 0xA4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# Bits and their Gumbel noise: -log(-log u) to 60 decimal digits, rounded once to float32. Both ends, where forms in
# float32 lose their digits or reach infinity; around the zero near 1/e; the nine low bits, which must not matter.
GUMBEL_VECTORS = [
    (0x00000000, "-0x1.67e0920000000p+1"),
    (0x000003FF, "-0x1.5f21ce0000000p+1"),
    (0x00000401, "-0x1.5ada580000000p+1"),
    (0x0001FF2C, "-0x1.2bbda80000000p+1"),
    (0x00400007, "-0x1.efa1da0000000p+0"),
    (0x20000080, "-0x1.76d5b20000000p-1"),
    (0x40000100, "-0x1.4e792a0000000p-2"),
    (0x5E2D55FF, "-0x1.4e96540000000p-21"),
    (0x5E2D5600, "-0x1.413c000000000p-22"),
    (0x5E2D5821, "0x1.ab4a840000000p-26"),
    (0x5E2D5BFF, "0x1.76a5500000000p-22"),
    (0x7FFFFFFF, "0x1.774f1e0000000p-2"),
    (0x80000000, "0x1.774f360000000p-2"),
    (0xFFC00063, "0x1.bb963c0000000p+2"),
    (0xFFFE01E0, "0x1.4cc5d20000000p+3"),
    (0xFFFFFA00, "0x1.e0d5c40000000p+3"),
    (0xFFFFFC02, "0x1.f12e720000000p+3"),
    (0xFFFFFFFF, "0x1.0a2b240000000p+4"),
]
GUMBEL_BITS = [bits for bits, _ in GUMBEL_VECTORS]
GUMBEL_NOISE = [float.fromhex(noise) for _, noise in GUMBEL_VECTORS]

# sha256 of the noise of all 2^23 uniforms in order, little-endian float32.
ALL_NOISE_SHA256 = "d579488fe28e6abc92b072bbe361e480004bff809db3200259948c2756ebe0d7"
