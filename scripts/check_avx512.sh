#!/usr/bin/env bash
# The C kernels on an emulated Sapphire Rapids: AVX-512 without bfloat16, with it, and with float16 and AMX. It takes ten minutes, and ten more to build Bochs.
#   BOCHS=SOURCE KERNEL=VMLINUZ scripts/check_avx512.sh
# BOCHS: a source tree of Bochs after 3.0 (github.com/bochs-emu/Bochs, its folder bochs), mended and built if it is not yet. KERNEL: a
# Linux of 5.16 or newer (Debian: linux-image-cloud-amd64). Debian: apt-get install busybox-static cpio grub-pc-bin xorriso mtools
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ ! -x "$BOCHS/bochs" ]; then
    # Linux lets programs use AMX where the processor can forbid it (XFD), which Bochs does not say of its own. And the snapshot
    # of August 2026 reads past a register where two vectors become one of bfloat16.
    sed -i -e '/BX_ISA_XSAVES/{n;s/(1<<3);/(1<<3) | (1<<4);/}' \
        -e 's/= xsave_restore\[subfunction\].attr;/= xsave_restore[subfunction].attr | (subfunction == 18 ? 4 : 0);/' "$BOCHS/cpu/cpuid.cc"
    sed -i 's/bfloat16(op1.vmm32u(n));/bfloat16(op1.vmm32u(n - DWORD_ELEMENTS(len)));/' "$BOCHS/cpu/avx/avx512_bf16.cc"
    (cd "$BOCHS" && ./configure --enable-x86-64 --enable-cpu-level=6 --enable-fpu --enable-avx --enable-evex --enable-amx \
        --enable-all-optimizations --enable-pci --with-nogui --disable-docbook && make -j2) > "$scratch/build.log" 2>&1 ||
        { tail -5 "$scratch/build.log"; exit 1; }
fi

sources="tests/processors.c edkm_cli/runtime/lut_linear.c edkm_cli/runtime/lut_narrow.c edkm_cli/runtime/lut_pairs.c edkm_cli/runtime/lut_tiles.c
edkm_cli/kernels/palette.c edkm_cli/kernels/columns.c edkm_cli/kernels/kmeans.c"
mkdir -p "$scratch/root/dev" "$scratch/root/bin" "$scratch/disk/boot/grub"
build() { # a level of edkm_cli/kernels/levels.py
    flags=$(cd edkm_cli/kernels && python3 -c "import levels; print(*{one.name: one.flags for one in levels.levels()}['$1'])")
    gcc -O3 -static -Wno-psabi -fno-math-errno -fno-trapping-math -Iedkm_cli/kernels $flags $sources -o "$scratch/root/$1" -lm
}
for level in avx512 avx512-bf16 avx512-fp16; do build $level; done
cp "$(command -v busybox)" "$scratch/root/bin/sh"
cat > "$scratch/root/init" << 'END'
#!/bin/sh
echo "avx512: $(/avx512)"
for by in pairs ones; do echo "avx512-bf16, multiplied by $by: $(EDKM_MULTIPLY=$by /avx512-bf16)"; done
echo "avx512-fp16, multiplied by amx: $(/avx512-fp16)"
echo "avx512-fp16, multiplied by pairs: $(EDKM_MULTIPLY=pairs /avx512-fp16)"
echo "that was all"
read forever
END
chmod +x "$scratch/root/init"
mknod "$scratch/root/dev/console" c 5 1
(cd "$scratch/root" && find . | cpio -o -H newc 2> /dev/null | gzip -1) > "$scratch/disk/boot/initrd.gz"
cp "$KERNEL" "$scratch/disk/boot/vmlinuz"
# Without pauses until a time (WAITPKG) and fast short strings (FSRM), with which this emulation and Linux do not get on.
cat > "$scratch/disk/boot/grub/grub.cfg" << 'END'
set timeout=0
menuentry "check" {
  linux /boot/vmlinuz console=ttyS0,115200 mitigations=off tsc=reliable lpj=4400000 lsm=capability clearcpuid=517,580 no5lvl mce=off nowatchdog quiet
  initrd /boot/initrd.gz
}
END
grub-mkrescue -o "$scratch/disk.iso" "$scratch/disk" > /dev/null 2>&1
cat > "$scratch/bochsrc" << END
megs: 512
cpu: model=sapphire_rapids, count=1, ips=2000000000, exclude_features="waitpkg,la57,cet,pku,pks,uintr,vmx"
romimage: file=$BOCHS/bios/BIOS-bochs-latest
vgaromimage: file=$BOCHS/bios/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=$scratch/disk.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$scratch/serial.txt
log: $scratch/bochs.log
display_library: nogui
panic: action=fatal
error: action=ignore
info: action=ignore
END
"$BOCHS/bochs" -q -f "$scratch/bochsrc" > /dev/null 2>&1 < /dev/null &
emulator=$!
until grep -q "that was all" "$scratch/serial.txt" 2> /dev/null || ! kill -0 $emulator 2> /dev/null; do sleep 5; done
kill $emulator 2> /dev/null || true
grep -a -E "^(avx512|wrong)" "$scratch/serial.txt"
[ "$(grep -a -c " 0 wrong" "$scratch/serial.txt")" = 5 ] # else a level was not run, or has a mistake
