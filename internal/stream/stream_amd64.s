#include "textflag.h"

// func copyBlocks(dst, src *byte, blocks uintptr)
//
// Copies blocks of 16 KiB. dst is aligned to 64 bytes. A block's four pages advance together, 64 bytes of each in turn: four
// streams for the hardware prefetcher, and each store fills a whole cache line, so that none is read from memory first.
TEXT ·copyBlocks(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ blocks+16(FP), CX

block:
	TESTQ CX, CX
	JZ    done
	MOVQ  $64, DX // lines of a page

line:
	PREFETCHT0 512(SI)
	PREFETCHT0 4608(SI)
	PREFETCHT0 8704(SI)
	PREFETCHT0 12800(SI)
	VMOVDQU    (SI), Y0
	VMOVDQU    32(SI), Y1
	VMOVDQU    4096(SI), Y2
	VMOVDQU    4128(SI), Y3
	VMOVDQU    8192(SI), Y4
	VMOVDQU    8224(SI), Y5
	VMOVDQU    12288(SI), Y6
	VMOVDQU    12320(SI), Y7
	VMOVNTDQ   Y0, (DI)
	VMOVNTDQ   Y1, 32(DI)
	VMOVNTDQ   Y2, 4096(DI)
	VMOVNTDQ   Y3, 4128(DI)
	VMOVNTDQ   Y4, 8192(DI)
	VMOVNTDQ   Y5, 8224(DI)
	VMOVNTDQ   Y6, 12288(DI)
	VMOVNTDQ   Y7, 12320(DI)
	ADDQ       $64, SI
	ADDQ       $64, DI
	DECQ       DX
	JNZ        line

	ADDQ $12288, SI
	ADDQ $12288, DI
	DECQ CX
	JMP  block

done:
	SFENCE // streaming stores are ordered by nothing else
	VZEROUPPER
	RET
