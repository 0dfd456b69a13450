"""The arithmetic that every node computes to the same bit: the agreed state, and how a round changes it.

`replica` is the agreed state, and all that a node does with it. `transform` (DCT), `selection` (top-k) and `codec` make
a payload and read it; `aggregate` sums the payloads of a round in integers, `scales` bounds each of them, `rules`
chooses which of them count, `schedule` gives the rate, `outer` applies it all to the weights and the outer momentum,
`root` computes the digest that the members sign; `exactness` asks a device for known bits first. `shortage` goes on in
main memory where the device has too little, `cards` says what is wrong with one, and `native` does in C what is slow in
NumPy. On a card `kernels` does what is exact here, and what leads to a payload.

Any change here must give the same bits on every machine, with any number of threads and in any order of
contributions. The golden roots (tests/golden/) prove it on each machine that runs the tests; a run keeps the arithmetic
it began with, so a change of bits is a new protocol version."""
