// The part of the CUDA driver that the engine links against. It asks for none of it on one GPU; each says "no device".
#define NO_DEVICE(name) \
    extern "C" int name() { return 100; }

NO_DEVICE(cuDeviceGetAttribute)
NO_DEVICE(cuGetErrorString)
NO_DEVICE(cuMemAddressFree)
NO_DEVICE(cuMemAddressReserve)
NO_DEVICE(cuMemCreate)
NO_DEVICE(cuMemGetAllocationGranularity)
NO_DEVICE(cuMemMap)
NO_DEVICE(cuMemRelease)
NO_DEVICE(cuMemRetainAllocationHandle)
NO_DEVICE(cuMemSetAccess)
NO_DEVICE(cuMemUnmap)
NO_DEVICE(cuMulticastAddDevice)
NO_DEVICE(cuMulticastBindMem)
NO_DEVICE(cuMulticastCreate)
NO_DEVICE(cuMulticastGetGranularity)
NO_DEVICE(cuMulticastUnbind)
