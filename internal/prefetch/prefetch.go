// Package prefetch asks the processor to bring memory into its nearest cache ahead of its use. That changes nothing and cannot
// fault, wherever it points.
package prefetch

// Line is what is reckoned with as the bytes of one line of cache. Where lines are larger, some are asked for twice.
const Line = 64
